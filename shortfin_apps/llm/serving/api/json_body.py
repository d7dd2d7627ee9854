"""JSON bodies, parsed by orjson: it is fast, and refuses NaN.

Routes also limit a body's contents before parsing it, and name its ignored fields in an answer header.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache
from typing import Any

import orjson
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from shortfin_apps.llm.contract.errors import ModelNotFoundError
from shortfin_apps.llm.lone_surrogates import without_lone_surrogates
from shortfin_apps.llm.serving.api.body_fields import HEADER, header_value
from shortfin_apps.llm.serving.api.schema import Body, ChatMessage
from shortfin_apps.llm.serving.api.service import Service, service_of

logger = logging.getLogger(__name__)

OWN_VARIABLES = frozenset({"messages", "add_generation_prompt"})  # set by body fields of their own


class JsonRequest(Request):
    """A request parsed by orjson. Its parse error is a `json.JSONDecodeError`."""

    async def json(self) -> Any:
        body, limits = await self.body(), service_of(self).limits
        limits.check_json_text(body)
        value = _parsed(body)
        limits.check_json(value)
        return value


def _parsed(body: bytes) -> Any:
    """Parse JSON. Lone surrogates become U+FFFD, as one in the history is sent again with every turn."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        value = orjson.loads(without_lone_surrogates(body))
    _log_surrogates()
    return value


@cache
def _log_surrogates() -> None:
    """Log a warning once per process."""
    logger.warning(
        "a request had lone surrogates, which are halves of characters; each was replaced with U+FFFD, as in"
        " later requests, which are not logged"
    )


class JsonRoute(APIRoute):
    """A route with a JsonRequest; its handler must call `check_fields`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            response = await handle(JsonRequest(request.scope, request.receive))
            if ignored := getattr(request.state, "ignored_fields", None):
                response.headers[HEADER] = header_value(ignored)
            return response

        return handle_json


def check_model(service: Service, name: str | None) -> None:
    """Raise ModelNotFoundError for a name other than the served model's; None is accepted."""
    if name is not None and name != service.name:
        raise ModelNotFoundError(f"the model {name!r} is not served here; {service.name!r} is", "model")


def check_fields(body: Body, request: Request) -> None:
    """Raise InvalidRequestError for another model or an unsupported field; record ignored ones to tell."""
    service = service_of(request)
    check_model(service, vars(body).get("model"))
    request.state.ignored_fields = service.field_check.ignored(body)


def note_unread(
    messages: Sequence[ChatMessage],
    variables: Mapping[str, Any] | None,
    request: Request,
    field: str = "messages",
) -> None:
    """Record message fields and `chat_template_kwargs` that the chat template does not read.

    `field` is the name of the body's messages. `--strict-fields` does not refuse these fields: the client may
    also use a model with a template that reads them.
    """
    service = service_of(request)
    words = service.model.generator.tokenizer.template_words
    unread = {f"{field}.{name}": None for message in messages for name in message.unread_by(words)}
    unread |= {
        f"chat_template_kwargs.{name}": None
        for name, value in (variables or {}).items()
        if value is not None and (name not in words or name in OWN_VARIABLES)
    }
    service.field_check.log(list(unread))
    known = getattr(request.state, "ignored_fields", [])
    request.state.ignored_fields = list(dict.fromkeys([*known, *unread]))
