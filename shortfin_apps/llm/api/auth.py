"""API keys, needed for all routes but health checks, and admin keys, needed for a few routes.

Keys are stored as HMACs under a secret of this process, so that the digest which identifies a caller in the
prefix cache and the queue reveals nothing about the key.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from shortfin_apps.llm.api.access_log import access_of
from shortfin_apps.llm.api.errors import ForbiddenError, UnauthorizedError, error_response

OPEN_PATHS = frozenset({"/health", "/ready"})  # for load balancers, which have no key
SCHEME = "bearer"


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. `tenant` is "" if the server has no API keys."""

    tenant: str
    is_admin: bool

    def cache_salt(self, requested: str | None) -> str | None:
        """The salt of the caller's prompts: tenants never share pages, even with equal requested salts."""
        return f"{self.tenant}:{requested or ''}" if self.tenant else requested


ANONYMOUS = Caller(tenant="", is_admin=False)


class KeyRing:
    """A server's keys. Without API keys everybody may call; without admin keys nobody is an admin."""

    def __init__(self, keys: Iterable[str] = (), admin_keys: Iterable[str] = ()) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys = tuple(map(self._digest, keys))
        self._admin_keys = tuple(map(self._digest, admin_keys))

    @property
    def required(self) -> bool:
        """Whether callers need a key."""
        return bool(self._keys)

    def caller(self, key: str) -> Caller | None:
        """The caller with this key; None if the key is unknown. Takes the same time for every key."""
        digest = self._digest(key)
        is_admin = _is_among(digest, self._admin_keys)
        is_known = _is_among(digest, self._keys)
        if is_admin or is_known:
            return Caller(digest.hex()[:16], is_admin)
        return None if self.required else ANONYMOUS

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogatepass"), "sha256")


class AuthMiddleware:
    """Rejects requests without a valid key before any other work; sets the caller for the routes."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        caller = self._keys.caller(_bearer(Headers(scope=scope)))
        if caller is None and scope["path"].removeprefix(scope.get("root_path", "")) not in OPEN_PATHS:
            error = UnauthorizedError("an API key is needed: send `Authorization: Bearer KEY`")
            await error_response(Request(scope), error)(scope, receive, send)
            return
        scope["state"]["caller"] = caller or ANONYMOUS
        if caller is not None:
            access_of(Request(scope)).tenant = caller.tenant or None
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def require_admin(request: Request) -> None:
    """Dependency of the admin routes. Raises ForbiddenError."""
    if not caller_of(request).is_admin:
        raise ForbiddenError("this route needs an admin key: one of the server's `--admin-api-key`")


def _bearer(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == SCHEME else ""


def _is_among(digest: bytes, known: Iterable[bytes]) -> bool:
    found = False
    for other in known:
        found |= hmac.compare_digest(digest, other)
    return found
