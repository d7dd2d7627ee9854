"""API keys, admin keys and gateway keys.

All routes but health checks need an API key; a few need an admin key. A gateway sends requests for its
tenants and names the tenant in a header, by default `X-Tenant`. The header is ignored for other keys.

Keys are stored as HMACs under a secret of this process. The digest that identifies a caller in the prefix
cache and the queue therefore reveals nothing about the key.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.frontend.text_workers import current_tenant, current_wait
from shortfin_apps.llm.serving.http.access_log import access_of
from shortfin_apps.llm.serving.http.errors import ForbiddenError, UnauthorizedError, error_response
from shortfin_apps.llm.serving.http.streaming import race

OPEN_PATHS = frozenset({"/health", "/ready", "/live"})  # for load balancers, which have no key
SCHEME = "bearer"
KEY_HEADER = "X-Api-Key"  # Anthropic's
TENANT_HEADER = "X-Tenant"
TENANT = re.compile(r"[\x21-\x2b\x2d-\x7e]{1,256}")  # no comma: proxies join repeated headers with it
NO_KEY = f"an API key is needed: send `Authorization: Bearer KEY` or `{KEY_HEADER}: KEY`"
WRONG_KEY = "the API key is not one of this server's keys; check it"
WITHOUT_TENANT = frozenset({"GET", "HEAD", "OPTIONS"})  # methods of a gateway's own requests


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    `tenant`: the tenant to which the request's tokens are counted; "" if the server needs no key. `digest`:
    fixed-length hash that identifies the tenant in the log and the prefix cache instead of the name.
    """

    tenant: str
    digest: str
    is_admin: bool = False
    is_gateway: bool = False

    def cache_salt(self, requested: str | None) -> str | None:
        """Return the cache salt of the caller's prompts. Tenants never share pages, whatever they request."""
        return f"{self.digest}:{requested or ''}" if self.digest else requested


ANONYMOUS = Caller(tenant="", digest="")


class KeyRing:
    """A server's keys. Without API keys and gateway keys, no key is needed.

    Without admin keys there are no admins. Gateways name tenants in `tenant_header`.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        admin_keys: Iterable[str] = (),
        gateway_keys: Iterable[str] = (),
        tenant_header: str = TENANT_HEADER,
    ) -> None:
        self._tenant_header = tenant_header
        self._secret = secrets.token_bytes(32)
        self._keys = tuple(map(self._digest, keys))
        self._admin_keys = tuple(map(self._digest, admin_keys))
        self._gateway_keys = tuple(map(self._digest, gateway_keys))

    @property
    def required(self) -> bool:
        """Whether callers need a key."""
        return bool(self._keys or self._gateway_keys)

    def caller(self, key: str) -> Caller | None:
        """Return the caller with this key; None if it is unknown and the server needs a key.

        Takes the same time for every key.
        """
        digest = self._digest(key)
        is_admin = _is_among(digest, self._admin_keys)
        is_gateway = _is_among(digest, self._gateway_keys)
        is_known = _is_among(digest, self._keys)
        if is_admin or is_gateway or is_known:
            name = _short(digest)
            return Caller(name, name, is_admin, is_gateway)
        return None if self.required else ANONYMOUS

    def tenant_of(self, gateway: Caller, headers: Headers, method: str) -> Caller:
        """Return the tenant that a gateway's request names; the gateway for a GET without a tenant.

        Gateways with different keys share tenant names. Raises InvalidRequestError unless exactly one header
        names the tenant: of two headers, one may be a client's, if the gateway adds one without removing it.
        """
        named = headers.getlist(self._tenant_header)
        if not named and method in WITHOUT_TENANT:
            return gateway
        if len(named) != 1 or not TENANT.fullmatch(named[0]):
            raise InvalidRequestError(
                f"a request with a gateway key needs one header `{self._tenant_header}` that names its "
                "tenant: 1 to 256 visible ASCII characters, no comma; the gateway must replace its clients'",
                self._tenant_header,
            )
        # No key contains a space, so this digest never equals that of a key.
        return replace(gateway, tenant=named[0], digest=_short(self._digest(f"tenant {named[0]}")))

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogatepass"), "sha256")


class AuthMiddleware:
    """Rejects requests without a valid key before any other work; sets the caller for the routes.

    Paths in `open_paths` need no key. Text workers count their work for the caller's tenant, and start none
    after the caller has disconnected.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: frozenset[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        key = _key(headers)
        caller = self._keys.caller(key)
        if caller is None and scope["path"].removeprefix(scope.get("root_path", "")) not in self._open_paths:
            error = UnauthorizedError(WRONG_KEY if key else NO_KEY)
            await error_response(Request(scope), error)(scope, receive, send)
            return
        if caller is not None and caller.is_gateway:
            try:
                caller = self._keys.tenant_of(caller, headers, scope["method"])
            except InvalidRequestError as error:
                await error_response(Request(scope), error)(scope, receive, send)
                return
        scope["state"]["caller"] = caller or ANONYMOUS
        current_tenant.set((caller or ANONYMOUS).tenant)
        current_wait.set(partial(race, receive))  # routes have read the body before they wait
        if caller is not None:
            access_of(Request(scope)).tenant = caller.digest or None
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def require_admin(request: Request) -> None:
    """Dependency of the admin routes. Raises ForbiddenError."""
    if not caller_of(request).is_admin:
        raise ForbiddenError("this route needs an admin key: one of the server's `--admin-api-key`")


def _key(headers: Headers) -> str:
    """Return the request's key, or "". `Authorization` comes first, as it is the header that proxies set."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == SCHEME else headers.get(KEY_HEADER, "").strip()


def _short(digest: bytes) -> str:
    return digest.hex()[:16]


def _is_among(digest: bytes, known: Iterable[bytes]) -> bool:
    found = False
    for other in known:
        found |= hmac.compare_digest(digest, other)
    return found
