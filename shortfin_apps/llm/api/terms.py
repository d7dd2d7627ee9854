"""On what terms a request is served: the fields and the header that say so."""

from __future__ import annotations

from typing import Protocol

from starlette.requests import Request

from shortfin_apps.llm.api.access_log import access_of
from shortfin_apps.llm.api.auth import caller_of
from shortfin_apps.llm.components.request.messages import Terms

TENANT_HEADER = "X-Tenant"


class TermsFields(Protocol):
    """The fields that bodies have in common; None where the client said nothing."""

    @property
    def priority(self) -> int | None: ...
    @property
    def user(self) -> str | None: ...
    @property
    def timeout_s(self) -> float | None: ...


def terms_of(fields: TermsFields, request: Request) -> Terms:
    """The tenant is the API key's; where none is asked for, the header's or else the body's `user`.

    Raises InvalidRequestError naming the field.
    """
    claimed = request.headers.get(TENANT_HEADER) or fields.user or ""
    access_of(request).claim(claimed)
    return Terms(
        priority=fields.priority or 0,
        tenant=caller_of(request).tenant or claimed,
        timeout_s=fields.timeout_s,
    )
