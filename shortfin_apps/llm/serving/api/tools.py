"""Derives the grammar and the parser of answers from a chat's tools and the model's format of reasoning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shortfin_apps.llm.components.grammar.json_schema import without_annotations
from shortfin_apps.llm.components.grammar.source import (
    AskedGrammar,
    GrammarKind,
    GrammarSource,
    Named,
    named_source,
)
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.schema import AllowedToolChoice, ChatBody, NamedTool, Tool
from shortfin_apps.llm.serving.api.service import ServedModel
from shortfin_apps.llm.serving.api.thought_budget import AskedBudget, asked_budget
from shortfin_apps.llm.serving.dialects.dialect import NO_DIALECT, Dialect, Function
from shortfin_apps.llm.serving.dialects.lark import ANY_TEXT, Lark, one_of
from shortfin_apps.llm.serving.dialects.output_parser import OutputParser

RESPONSE_FORMAT = "response_format"
MAX_CALLS = 16  # per answer with a grammar, so that a weak model does not repeat calls until its limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools in the prompt (`shown`), and the `functions` that the model may call.

    `is_required`: the model must call one. `parallel`: an answer may have several calls.
    """

    shown: tuple[dict[str, Any], ...] = ()
    functions: tuple[Function, ...] = ()
    is_required: bool = False
    parallel: bool = True

    @property
    def is_strict(self) -> bool:
        """Whether any function is strict, so that its calls must match its schema."""
        return any(function.strict for function in self.functions)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How to parse the answers to a request.

    `is_open`: the prompt ends inside reasoning, so that answers begin there (set by `after`).
    `calls_end_thoughts`: a tool call ends reasoning; false if a grammar forces the end mark before a call.
    `is_required`: a grammar allows only calls after the reasoning.
    `with_reasoning`: answers include the reasoning.
    """

    dialect: Dialect = NO_DIALECT
    functions: tuple[Function, ...] = ()
    is_open: bool = False
    parallel: bool = True
    calls_end_thoughts: bool = True
    is_required: bool = False
    with_reasoning: bool = True
    id_chars: int | None = None  # length of a tool call's id; None: any

    def after(self, prompt: str) -> AnswerForm:
        """Return the form for answers to the rendered `prompt`: `is_open` if it ends inside reasoning."""
        reasoning = self.dialect.reasoning
        if reasoning is None or not reasoning.is_open(prompt):
            return self
        is_strict = any(function.strict for function in self.functions)
        return replace(self, is_open=True, calls_end_thoughts=self.calls_end_thoughts and not is_strict)

    def shown_ids(self, special_tokens: Mapping[str, int]) -> frozenset[int]:
        """Return the ids of the special tokens that must be in the text for the parser.

        `special_tokens`: token string to id.
        """
        return frozenset(special_tokens[mark] for mark in self.dialect.marks if mark in special_tokens)

    def parser(self) -> OutputParser:
        return OutputParser(
            self.dialect,
            self.functions,
            is_open=self.is_open,
            parallel=self.parallel,
            calls_end_thoughts=self.calls_end_thoughts,
            is_required=self.is_required,
        )


PLAIN = AnswerForm()


def tool_use(body: ChatBody, dialect: Dialect) -> ToolUse:
    """Read the tools and the tool choice of a chat.

    Raises InvalidRequestError for invalid tools, or if the model does not support tools.
    """
    choice = body.tool_choice or "auto"
    if not body.tools:
        if choice not in ("none", "auto"):
            raise InvalidRequestError("`tool_choice` needs `tools` to choose from", "tool_choice")
        return ToolUse()
    _check_names(body.tools)
    if choice == "none":  # hide the tools, so that the model does not call them
        return ToolUse()
    if dialect.tools is None:
        raise InvalidRequestError(
            "this model's chat template has no form of tool calls that is known here; serve it with"
            " `--tool-parser` and the form that it was trained on, or leave `tools` out",
            "tools",
        )
    shown, callable_names, is_required = _chosen(choice, body.tools)
    return ToolUse(
        shown=tuple(tool.for_template() for tool in shown),
        functions=tuple(_function(tool) for tool in shown if tool.function.name in callable_names),
        is_required=is_required,
        parallel=body.parallel_tool_calls is not False and not isinstance(choice, NamedTool),
    )


def template_variables(body: ChatBody, model: ServedModel) -> Mapping[str, Any] | None:
    """Return `chat_template_kwargs`, with the body's `reasoning_effort` added if it is given.

    Raises InvalidRequestError if the template does not support `reasoning_effort`.
    """
    if body.reasoning_effort is None:
        return body.chat_template_kwargs
    if "reasoning_effort" not in (model.generator.tokenizer.tool_template_source or ""):
        raise InvalidRequestError(
            "`reasoning_effort` is not known to this model's chat template; leave it out", "reasoning_effort"
        )
    return {"reasoning_effort": body.reasoning_effort, **(body.chat_template_kwargs or {})}


def answer_rules(body: ChatBody, use: ToolUse, model: ServedModel) -> tuple[AskedGrammar | None, AnswerForm]:
    """Return the grammar of the answers (None if not needed), and how to parse them.

    Callers must later pass the rendered prompt to the grammar's sources and to the form's `after`.
    Raises InvalidRequestError for tools combined with a grammar that is not a JSON schema.
    """
    named, budget = named_source(body.grammar_fields()), asked_budget(body, model.dialect.reasoning)
    grammar = _grammar(named, use, model)
    if _is_bare(named, use, model):
        return grammar, PLAIN
    form = _form(body, use, model)
    if budget is None:
        return grammar, form
    # The end of the reasoning may be forced within a call, which therefore stays part of the reasoning.
    return _budgeted(budget, grammar, use, model), replace(form, calls_end_thoughts=False)


def unused_schema(body: ChatBody, use: ToolUse) -> str | None:
    """Return the field whose JSON schema has no effect because every answer is a call, or None."""
    named = named_source(body.grammar_fields()) if use.is_required else None
    if named is None:
        return None
    param, _ = named
    return RESPONSE_FORMAT if param.startswith(RESPONSE_FORMAT) else param


def _grammar(named: Named | None, use: ToolUse, model: ServedModel) -> AskedGrammar | None:
    """Return the grammar of the answers; None if not needed.

    With required calls or a JSON schema: reasoning, then calls or JSON. With optional calls to strict
    functions: reasoning, then text with valid calls. Optional calls to other functions need no grammar.
    """
    schema = None if named is None else _schema_of(named[1])
    if named is not None and schema is None and use.functions:
        param, _ = named
        raise InvalidRequestError(
            f"`{param}` must be a JSON schema if there are `tools`; leave one of them out, or set "
            "`tool_choice` to `none`",
            param,
        )
    if use.is_required:
        return AskedGrammar("tools", _sources(use, partial(_lark, model, None)))
    if named is None:
        return AskedGrammar("tools", _sources(use, partial(_lark_of_text, model))) if use.is_strict else None
    param, source = named
    if _is_bare(named, use, model):
        return AskedGrammar(param, [lambda prompt: source])
    return AskedGrammar(param, _sources(use, partial(_lark, model, schema)))


def _budgeted(
    budget: AskedBudget, grammar: AskedGrammar | None, use: ToolUse, model: ServedModel
) -> AskedGrammar:
    """Return the grammar with the budget; without a grammar, one of any answer.

    In a format of messages, any answer might have more reasoning later, so an answer's messages are fixed.
    """
    if grammar is not None:
        return budget.on(grammar)
    if not budget.reasoning.content_begin:
        return budget.on_any_text()
    return budget.on(AskedGrammar(budget.param, _sources(use, partial(_lark_of_text, model))))


def _is_bare(named: Named | None, use: ToolUse, model: ServedModel) -> bool:
    """Whether the requested grammar applies from the first token, as no reasoning or call may precede."""
    if named is None or use.functions:
        return False
    return model.dialect.reasoning is None or _schema_of(named[1]) is None


def _form(body: ChatBody, use: ToolUse, model: ServedModel) -> AnswerForm:
    dialect = model.dialect
    if body.separate_reasoning is False:
        dialect = replace(dialect, reasoning=None)
    if not use.functions:
        dialect = replace(dialect, tools=None)
    return AnswerForm(
        dialect=dialect,
        functions=use.functions,
        parallel=use.parallel,
        calls_end_thoughts=not use.is_required,
        is_required=use.is_required,
        with_reasoning=body.include_reasoning is not False,
        id_chars=None if dialect.tools is None else dialect.tools.id_chars,
    )


def _lark(model: ServedModel, schema: Mapping[str, Any] | None, use: ToolUse, prompt: str) -> str:
    """Return a Lark grammar of reasoning, followed by calls or by JSON that matches `schema` (if given)."""
    tools, reasoning = model.dialect.tools, model.dialect.reasoning
    lark = Lark(model.generator.tokenizer.tag_tokens)
    begin = "" if reasoning is None else lark.literal(reasoning.content_begin)
    answers = [] if schema is None else [f"{begin} {lark.json(schema, strict=True)}"]
    if use.functions:
        assert tools is not None, "`tool_use` checks it"
        answers.append(tools.calls(lark, use.functions, _most_calls(use)))
    thought = "" if reasoning is None else reasoning.thought(lark, prompt)
    return lark.source(f"{thought} {one_of(answers)}")


def _lark_of_text(model: ServedModel, use: ToolUse, prompt: str) -> str:
    """Return a Lark grammar of reasoning, followed by text with valid calls of the functions, if any."""
    tools, reasoning = model.dialect.tools, model.dialect.reasoning
    lark = Lark(model.generator.tokenizer.tag_tokens)
    thought = "" if reasoning is None else reasoning.thought(lark, prompt)
    if use.functions:
        assert tools is not None, "`tool_use` checks it"
        return lark.source(f"{thought} {tools.answer(lark, use.functions, _most_calls(use))}")
    begin = "" if reasoning is None else lark.literal(reasoning.content_begin)
    return lark.source(f"{thought} {begin} {ANY_TEXT}")


def _most_calls(use: ToolUse) -> int:
    return MAX_CALLS if use.parallel else 1


def _sources(use: ToolUse, lark_of: Callable[[ToolUse, str], str]) -> list[Callable[[str], GrammarSource]]:
    """Return functions from the prompt to a grammar, to be tried in order, each looser than the one before.

    Looser grammars, for schemas that cannot be compiled, reduce the schemas of non-strict functions: first to
    names and types of arguments, then to any object.
    """
    functions = tuple(
        replace(each, parameters=without_annotations(each.parameters)) for each in use.functions
    )
    candidates = [functions]
    for loosen in (_types_only, _any_arguments):
        loose = tuple(each if each.strict else loosen(each) for each in functions)
        if loose != candidates[-1]:
            candidates.append(loose)

    def source(functions: tuple[Function, ...], prompt: str) -> GrammarSource:
        return GrammarSource(GrammarKind.LARK, lark_of(replace(use, functions=functions), prompt))

    return [partial(source, each) for each in candidates]


def _types_only(function: Function) -> Function:
    """Return the function with the schemas of its arguments reduced to their names and types."""
    properties = function.parameters.get("properties")
    if not isinstance(properties, dict):
        return _any_arguments(function)
    kinds = {
        name: {"type": each["type"]} if isinstance(each, dict) and isinstance(each.get("type"), str) else {}
        for name, each in properties.items()
    }
    return replace(function, parameters={"type": "object", "properties": kinds})


def _any_arguments(function: Function) -> Function:
    return replace(function, parameters={"type": "object"})


def _schema_of(source: GrammarSource) -> Mapping[str, Any] | None:
    """Return the JSON schema of a grammar source; None for another kind of grammar or an invalid schema."""
    if source.kind is not GrammarKind.JSON_SCHEMA:
        return None
    try:
        schema = json.loads(source.text)
    except (ValueError, RecursionError):
        return None
    return schema if isinstance(schema, dict) else None


def _check_names(tools: Iterable[Tool]) -> None:
    names: set[str] = set()
    for tool in tools:
        if tool.function.name in names:
            raise InvalidRequestError(f"`tools` has several functions `{tool.function.name}`", "tools")
        names.add(tool.function.name)


def _chosen(choice: object, tools: list[Tool]) -> tuple[list[Tool], set[str], bool]:
    """Return the tools for the prompt, the callable functions' names, and whether a call is required.

    Raises InvalidRequestError if the choice names an unknown function.
    """
    if isinstance(choice, NamedTool):
        return tools, _known([choice], tools), True
    if isinstance(choice, AllowedToolChoice):
        names = _known(choice.allowed_tools.tools, tools)
        allowed = [tool for tool in tools if tool.function.name in names]
        return allowed, names, choice.allowed_tools.mode == "required"
    return tools, {tool.function.name for tool in tools}, choice == "required"


def _known(named: Iterable[NamedTool], tools: Iterable[Tool]) -> set[str]:
    names = {each.function.name for each in named}
    if unknown := names - {tool.function.name for tool in tools}:
        raise InvalidRequestError(f"`tool_choice`: no function in `tools` is `{min(unknown)}`", "tool_choice")
    return names


def _function(tool: Tool) -> Function:
    """Convert a tool. Raises InvalidRequestError if a strict tool's parameters are not of type `object`."""
    spec = tool.function
    function = Function(spec.name, spec.parameters or {}, strict=bool(spec.strict))
    kinds = function.parameters.get("type", "object")
    if function.strict and "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise InvalidRequestError(f"{function.owner}: the `type` of its parameters must be `object`", "tools")
    return function
