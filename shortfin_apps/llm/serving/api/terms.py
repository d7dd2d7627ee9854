"""A request's priority, tenant and timeout, from its body and headers."""

from __future__ import annotations

from starlette.requests import Request

from shortfin_apps.llm.components.request.messages import Terms
from shortfin_apps.llm.serving.api.access_log import access_of
from shortfin_apps.llm.serving.api.auth import TENANT_HEADER, caller_of
from shortfin_apps.llm.serving.api.schema import ServingFields


def terms_of(body: ServingFields, request: Request) -> Terms:
    """Read the terms. The tenant is the caller's; without keys, the `X-Tenant` header or the body's `user`.

    Raises InvalidRequestError naming the field.
    """
    claimed = request.headers.get(TENANT_HEADER) or body.user or ""
    access_of(request).set_claimed_tenant(claimed)
    return Terms(
        priority=body.priority or 0,
        tenant=caller_of(request).tenant or claimed,
        timeout_s=body.timeout_s,
    )
