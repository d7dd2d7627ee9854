"""Chat templates: jinja2 programs that come with a model and render messages in the format of its training.

They run in jinja2's sandbox, which denies access to the interpreter, but limits neither time nor memory.
Therefore a server renders templates in a process that can be killed (`rendering.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shortfin_apps.llm.contract.errors import ArtifactError, InvalidRequestError

MAX_CHARS = 1 << 24  # of the rendered text
MAX_REASON_CHARS = 1_000  # of an error; a template may put full messages in it


class ChatTemplate:
    """A compiled template. Immutable and thread-safe. Compiling may take any time, as it folds constants.

    Raises ArtifactError for a source that does not compile.
    """

    def __init__(self, source: str) -> None:
        environment = _environment()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # deep nesting, for example, raises Python's own errors
            raise _does_not_compile(error) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the rendered text. May take any time. Raises InvalidRequestError if the template fails."""
        context = {**variables, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._join(context)
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it may raise anything
            raise InvalidRequestError(
                f"the chat template refused these messages: {_reason(error)}", "messages"
            ) from error

    def _join(self, context: Mapping[str, Any]) -> str:
        pieces, size = [], 0
        for piece in self._template.generate(context):
            size += len(piece)
            if size > MAX_CHARS:
                raise SecurityError(f"it wrote more than {MAX_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)


def pick_template(template: object, name: str = "default") -> str | None:
    """Return the `chat_template` of a `tokenizer_config.json`, or None.

    Of a list of templates, returns the one called `name`, else `default`, else the first.
    """
    if not isinstance(template, list):
        return template if isinstance(template, str) else None
    named = {str(t.get("name")): t.get("template") for t in template if isinstance(t, dict)}
    chosen = named.get(name, named.get("default", next(iter(named.values()), None)))
    return chosen if isinstance(chosen, str) else None


def check_syntax(source: str) -> None:
    """Raise ArtifactError for a source that cannot be parsed, without compiling it."""
    try:
        _environment().parse(source)
    except Exception as error:  # deep nesting, for example, raises Python's own errors
        raise _does_not_compile(error) from error


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )


def _does_not_compile(error: Exception) -> ArtifactError:
    return ArtifactError(f"the chat template does not compile: {_reason(error)}")


def _reason(error: Exception) -> str:
    return str(error)[:MAX_REASON_CHARS]


class _GenerationTag(jinja2.ext.Extension):
    """Renders the body of `{% generation %}`, a tag that marks assistant text for training."""

    tags: set[str] = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise `value`, with parameters in the order of transformers' `tojson` filter, not jinja2's."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
