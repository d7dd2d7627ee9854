"""Chat templates: jinja2 programs that come with a model and render messages in the format of its training.

They run in jinja2's sandbox, which denies access to the interpreter and limits `range`, but not time and
memory. So here every iteration of a loop and every macro call checks the clock, and products and texts have a
maximum size. This is enough for careless templates with long messages; a hostile template can still waste
memory, but its author also controls the model's weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shortfin_apps.llm.errors import ArtifactError, InvalidRequestError

MAX_CPU_S = 1.0  # for one rendering, which typically takes 1 ms
MAX_CHARS = 1 << 24  # of the rendered text
MAX_PRODUCT = 1 << 20  # items of a repeated sequence, or bits of a number
TICK = "_tick"


class ChatTemplate:
    """A compiled template. Immutable and thread-safe.

    `clock` returns the calling thread's CPU time in seconds. Raises ArtifactError for a source that does
    not compile.
    """

    def __init__(self, source: str, clock: Callable[[], float] = time.thread_time) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(_with_ticks(environment.parse(source)))
        except Exception as error:  # deep nesting, for example, raises Python's own errors
            raise ArtifactError(f"the chat template does not compile: {error}") from error
        self._clock = clock

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The rendered text. Takes up to MAX_CPU_S. Raises InvalidRequestError if the template fails."""
        deadline = self._clock() + MAX_CPU_S

        def tick() -> None:
            if self._clock() > deadline:
                raise SecurityError(f"it took more than {MAX_CPU_S:g} s")

        context = {
            **variables,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            TICK: tick,
        }
        try:
            return self._join(context)
        except Exception as error:  # a template is a program: it may raise anything
            raise InvalidRequestError(
                f"the chat template refused these messages: {error}", "messages"
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
    """The template in `chat_template` of a `tokenizer_config.json`, of a list `name`, `default` or any."""
    if not isinstance(template, list):
        return template if isinstance(template, str) else None
    named = {str(t.get("name")): t.get("template") for t in template if isinstance(t, dict)}
    chosen = named.get(name, named.get("default", next(iter(named.values()), None)))
    return chosen if isinstance(chosen, str) else None


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _product_size(operator, left, right) > MAX_PRODUCT:
            raise SecurityError(f"the result of `{operator}` would be too large")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """Supports `{% generation %}`, which marks assistant text for training, by rendering its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _with_ticks(tree: nodes.Template) -> nodes.Template:
    """Inserts a call of TICK at the start of every loop body, macro and call block."""
    for node in list(tree.find_all(nodes.Stmt)):
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            call = nodes.Call(nodes.Name(TICK, "load"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
    return tree


def _product_size(operator: str, left: Any, right: Any) -> int:
    """Size of `left OPERATOR right` in items or bits; 0 if it is always small."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return bits + right.bit_length() if operator == "*" else bits * max(right, 0)
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, Sized) and isinstance(count, int):
            return len(sequence) * max(count, 0)
    return 0


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The arguments have the order of transformers' filter, not of jinja2's."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
