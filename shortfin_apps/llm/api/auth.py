"""Who may call: API keys for everything but health checks, admin keys for a few routes more.

Keys are kept as HMACs under a secret of this process: the digest that tells two callers apart, in the
prefix cache and in the queue, tells nothing about their keys.
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

OPEN_PATHS = frozenset({"/health", "/ready"})  # load balancers have no key
SCHEME = "bearer"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `tenant` is "" where no keys are asked for."""

    tenant: str
    is_admin: bool

    def cache_salt(self, asked: str | None) -> str | None:
        """The salt of the caller's prompts: no two tenants share pages, whatever salt they ask for."""
        return f"{self.tenant}:{asked or ''}" if self.tenant else asked


ANYONE = Caller(tenant="", is_admin=False)


class KeyRing:
    """The keys of a server. Without API keys everybody may call; without admin keys nobody is an admin."""

    def __init__(self, keys: Iterable[str] = (), admin_keys: Iterable[str] = ()) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys = tuple(map(self._digest, keys))
        self._admin_keys = tuple(map(self._digest, admin_keys))

    @property
    def required(self) -> bool:
        """Whether callers need a key."""
        return bool(self._keys)

    def caller(self, key: str) -> Caller | None:
        """Who holds `key`; None for a stranger. The time it takes does not depend on the key."""
        digest = self._digest(key)
        is_admin = _is_among(digest, self._admin_keys)
        is_known = _is_among(digest, self._keys)
        if is_admin or is_known:
            return Caller(digest.hex()[:16], is_admin)
        return None if self.required else ANYONE

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogatepass"), "sha256")


class AuthMiddleware:
    """Turns strangers away before anything else is done for them, and tells routes who calls."""

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
        scope["state"]["caller"] = caller or ANYONE
        if caller is not None:
            access_of(Request(scope)).tenant = caller.tenant or None
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def require_admin(request: Request) -> None:
    """A dependency of the routes that concern all callers. Raises ForbiddenError."""
    if not caller_of(request).is_admin:
        raise ForbiddenError("only an admin key opens this route: one of the server's `--admin-api-key`")


def _bearer(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == SCHEME else ""


def _is_among(digest: bytes, known: Iterable[bytes]) -> bool:
    found = False
    for other in known:
        found |= hmac.compare_digest(digest, other)
    return found
