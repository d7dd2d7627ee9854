"""Parses JSON bodies with orjson, and checks their fields once before the route's handler runs.

Fields that the route does not read are refused or ignored. The answer's header `X-Ignored-Fields` and the log
(once per name) name the ignored fields. Clients choose these names, so the names are escaped to printable
ASCII, and their length and number are limited.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import cache, wraps
from typing import Any
from urllib.parse import quote

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from shortfin_apps.llm.contract.errors import InvalidRequestError, ModelNotFoundError
from shortfin_apps.llm.lone_surrogates import without_lone_surrogates
from shortfin_apps.llm.serving.api.schema import FIELD_NAMES, NOT_SERVED, Body, ChatMessage, type_of
from shortfin_apps.llm.serving.api.service import Service, service_of
from shortfin_apps.llm.serving.api.unserved_fields import CHAT_INSTEAD, COMPLETION_INSTEAD
from shortfin_apps.llm.serving.http.errors import error_response

logger = logging.getLogger(__name__)

HEADER = "X-Ignored-Fields"
MAX_NAMED = 16  # names in one header
MAX_NAME_CHARS = 64
MAX_LOGGED = 256  # names logged by one process
REST = "..."  # marks a truncated name or list
NO_OBJECT = ("model_attributes_type", "model_type", "dict_type")  # pydantic's errors
OWN_VARIABLES = frozenset({"messages", "add_generation_prompt"})  # the body has separate fields for these


class JsonRequest(Request):
    """A request with a body that orjson parses. `json` raises `json.JSONDecodeError` for an invalid body."""

    async def json(self) -> Any:
        body, limits = await self.body(), service_of(self).limits
        limits.check_json_text(body)
        value = _parsed(body)
        limits.check_json(value)
        return value


def _parsed(body: bytes) -> Any:
    """Parse JSON; lone surrogates become U+FFFD.

    They are not refused, because a client sends one in its history again with every turn.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        value = orjson.loads(without_lone_surrogates(body))
    _log_surrogates()
    return value


@cache
def _log_surrogates() -> None:
    """Log a warning about lone surrogates, once per process."""
    logger.warning(
        "a request had lone surrogates, which are halves of characters; each was replaced with U+FFFD, as in"
        " later requests, which are not logged"
    )


class JsonRoute(APIRoute):
    """A route that passes a JsonRequest to its handler, after `check_body` if the handler takes a Body.

    A handler that takes a Body must also have a parameter `request`.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, _with_check(endpoint), **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            response = await handle(JsonRequest(request.scope, request.receive))
            if ignored := getattr(request.state, "ignored_fields", None):
                response.headers[HEADER] = header_value(ignored)
            return response

        return handle_json


def _with_check(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a handler so that `check_body` runs before it; a handler without a Body is returned unchanged."""
    signature = inspect.signature(endpoint, eval_str=True)
    kinds = {name: each.annotation for name, each in signature.parameters.items()}
    body = next(
        (name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Body)), None
    )
    if body is None:
        return endpoint

    @wraps(endpoint)
    async def checked(request: Request, **values: Any) -> Any:
        check_body(values[body], request)
        return await endpoint(request=request, **values)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


def check_body(body: Body, request: Request) -> None:
    """Check the model name and the fields; record the ignored fields in the request's state.

    Raises ModelNotFoundError for another model, and InvalidRequestError for an unsupported field.
    """
    check_model(service_of(request), vars(body).get("model"))
    request.state.ignored_fields = request.app.state.field_check.ignored(body)


def check_model(service: Service, name: str | None) -> None:
    """Raise ModelNotFoundError unless `name` is the served model's name, its source, or None."""
    if name not in (None, service.name, service.source):
        raise ModelNotFoundError(f"the model {name!r} is not served here; {service.name!r} is", "model")


def note_unread(
    messages: Sequence[ChatMessage], variables: Mapping[str, Any] | None, request: Request, field: str
) -> None:
    """Record as ignored the message fields and `chat_template_kwargs` that the chat template does not read.

    `field`: the name of the messages in the body. `--strict-fields` does not refuse these fields, because
    the template of another model may read them.
    """
    words = service_of(request).model.generator.tokenizer.template_words
    unread = {f"{field}.{name}": None for message in messages for name in message.unread_by(words)}
    unread |= {
        f"chat_template_kwargs.{name}": None
        for name, value in (variables or {}).items()
        if value is not None and (name not in words or name in OWN_VARIABLES)
    }
    note_ignored(list(unread), request)


def note_ignored(names: Sequence[str], request: Request) -> None:
    """Record the fields `names` as ignored, in addition to those that `check_body` recorded."""
    request.app.state.field_check.log(names)
    request.state.ignored_fields = list(dict.fromkeys([*request.state.ignored_fields, *names]))


class FieldCheck:
    """Finds the ignored fields of bodies, and logs each name once. `strict`: unknown fields are refused."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def ignored(self, body: Body) -> list[str]:
        """Return the names of a body's ignored fields, each once; log the names not logged before.

        Raises InvalidRequestError for an unsupported field and, if strict, for an unknown field.
        """
        names = dict.fromkeys(body.idle_fields())
        for prefix, each in _bodies_in(body):
            if not each.model_extra:  # no further fields: a fast path for long conversations
                continue
            unread = each.unread_fields(prefix)
            unknown = next((name for name in unread if name not in each.INERT), None)
            if self._strict and unknown is not None:
                shown = printable(prefix + unknown)
                raise InvalidRequestError(
                    f"`{shown}` is an unknown field; leave it out (the server has --strict-fields)", shown
                )
            names.update(dict.fromkeys(prefix + name for name in unread))
        self.log(list(names))
        return list(names)

    def log(self, names: Sequence[str]) -> None:
        """Log the `names` that were not logged before, up to MAX_LOGGED names in total."""
        for name in names:
            if len(self._logged) >= MAX_LOGGED:
                return
            if (shown := printable(name)) not in self._logged:
                self._logged.add(shown)
                logger.warning("requests have the field `%s`, which is ignored", shown)
                if len(self._logged) == MAX_LOGGED:
                    logger.warning("%d ignored fields were logged; further ones are not", MAX_LOGGED)


def header_value(names: Sequence[str]) -> str:
    """Return the value of `HEADER`: the first MAX_NAMED names, separated by commas."""
    rest = [REST] if len(names) > MAX_NAMED else []
    return ", ".join([*map(printable, names[:MAX_NAMED]), *rest])


def printable(name: str) -> str:
    """Truncate `name` to MAX_NAME_CHARS and percent-encode characters that are special in headers or logs."""
    if len(name) <= MAX_NAME_CHARS and len(shown := quote(name, safe="[]@!$")) <= MAX_NAME_CHARS:
        return shown
    return quote(name[:MAX_NAME_CHARS], safe="[]@!$")[: MAX_NAME_CHARS - len(REST)] + REST


def _bodies_in(body: Body, prefix: str = "") -> Iterator[tuple[str, Body]]:
    """Yield `body` and its nested bodies, each after the dotted prefix of its field names."""
    yield prefix, body
    for name, value in vars(body).items():
        if value is None or isinstance(value, str):  # fast path: pydantic's `isinstance` is slow
            continue
        several = value if isinstance(value, list) else [value]
        if several and isinstance(several[0], Body):  # the schema keeps lists uniform
            for each in several:
                yield from _bodies_in(each, f"{prefix}{name}.")


def install_validation_handler(app: FastAPI) -> None:
    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(request, _as_invalid_request(request, error))

    app.add_exception_handler(RequestValidationError, on_validation)


def _as_invalid_request(request: Request, error: RequestValidationError) -> InvalidRequestError:
    """Convert pydantic's errors to one sentence: the first invalid field and all rules that it breaks."""
    problems = error.errors()
    first = _first(problems)
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return InvalidRequestError(f"the body is not valid JSON: {reason}")
    if first["loc"][0] == "query":
        name = str(first["loc"][-1])
        return InvalidRequestError(f"`{name}`: {first['msg']}", name)
    param = _field(first["loc"])
    if param is None:
        if "json" not in request.headers.get("content-type", ""):
            return InvalidRequestError("send the body with the header `Content-Type: application/json`")
        if first["type"] == "missing":
            return InvalidRequestError("the body is empty; send a JSON object")
        return InvalidRequestError(f"the body: {_rule(first)}")
    place = _place(first["loc"])
    if first["type"] == NOT_SERVED:
        return InvalidRequestError(f"`{place}`: {first['msg']}{_given_type(first.get('input'))}", param)
    rules = dict.fromkeys(_rule(p) for p in problems if _field(p["loc"]) == param)
    return InvalidRequestError(f"`{place}`: {'; or '.join(rules)}", param)


def _rule(problem: Any) -> str:
    """Return the rule that a value breaks, in pydantic's words unless they would mislead."""
    if problem["type"] == "value_error":  # ours: pydantic puts "Value error, " before it
        return str(problem["ctx"]["error"])
    if problem["type"] in NO_OBJECT:
        return "Input should be a JSON object"  # pydantic's words are about Python's objects
    value = problem.get("input")
    if problem["type"] == "missing":
        return f"{problem['msg']}{_other_route(problem['loc'], value)}"
    if problem["type"] == "int_type" and isinstance(value, float) and abs(value) >= 2**63:
        return "Input should be an integer of at most 64 bits"  # orjson makes floats of longer ones
    return str(problem["msg"])


def _other_route(missing: Sequence[int | str], body: object) -> str:
    """Return advice for a body of the other one of OpenAI's routes; empty for any other body."""
    given = {"prompt": "messages", "messages": "prompt"}.get(str(missing[-1]))
    if given is None or not isinstance(body, dict) or given not in body:
        return ""
    return f"; with `{given}`, {(COMPLETION_INSTEAD | CHAT_INSTEAD)[given]}"


def _first(problems: Sequence[Any]) -> Any:
    """Return the problem to report.

    A list entry (such as a content part) with an unsupported `type` comes first. Otherwise the first invalid
    field is reported. Of the problems of a field with a union type, the one at the deepest location is
    reported, since that alternative of the union fits the value best.
    """
    if (not_served := next((p for p in problems if p["type"] == NOT_SERVED), None)) is not None:
        return not_served
    top = problems[0]["loc"][:2]
    return max((p for p in problems if p["loc"][:2] == top), key=lambda problem: len(_path(problem["loc"])))


def _given_type(value: object) -> str:
    kind = type_of(value)
    return "" if kind is None else f"; this one is of type `{kind[:40]}`"


def _field(location: Sequence[int | str]) -> str | None:
    """Return the dotted field name in a pydantic location, without list indices and union branches.

    Returns None if the location names no field.
    """
    return ".".join(part for part in _path(location) if isinstance(part, str)) or None


def _place(location: Sequence[int | str]) -> str:
    """Return the field name in a pydantic location with list indices, as in `messages[3].role`.

    Indices after a union branch are left out, as each branch reports another item.
    """
    place, is_certain = "", True
    for part in location[1:]:
        if isinstance(part, int):
            place += f"[{part}]" * is_certain
        elif part in FIELD_NAMES:
            place += f".{part}"
        else:
            is_certain = False
    return place.removeprefix(".")


def _path(location: Sequence[int | str]) -> list[int | str]:
    """Return a pydantic location without its first element and without union branches."""
    return [part for part in location[1:] if isinstance(part, int) or part in FIELD_NAMES]
