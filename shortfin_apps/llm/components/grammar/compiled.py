"""Grammars compiled with the llguidance library for one tokenizer, and their state along an output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.gbnf_to_lark import gbnf_to_lark

from shortfin_apps.llm.components.grammar.json_schema import Check, Schema
from shortfin_apps.llm.components.grammar.source import GrammarKind, GrammarSource, schema_source
from shortfin_apps.llm.components.grammar.source_schemas import with_equivalent_schemas, with_usable_schemas
from shortfin_apps.llm.components.grammar.thought_budget import BudgetedMatcher
from shortfin_apps.llm.components.request.grammar import Bitmask, GrammarMatcher
from shortfin_apps.llm.contract.errors import ConstraintError

PROBED_TOKENS = 4  # a grammar that is too expensive fails within its first tokens
# Stack of a compiling thread, because the library recurses along references. Only address space is reserved.
STACK_BYTES = 256 << 20
# Limits consecutive white space, because a weak model may otherwise generate it until its tokens are used up.
WHITE_SPACE = r"[ \n\t]{1,32}"

# Tells Lark from GBNF by the library's rule, but in linear time: the library's own expression takes time
# quadratic in the number of blank lines, and holds the GIL.
_IS_LARK = re.compile(r"^[^\S\n]*(?:%llguidance\b|start\s*:)", re.MULTILINE)
_SHORT_REASONS = {"NoExtensionBias": "nothing matches it", "": "no reason is given"}


class UnusableGrammar(Exception):
    """A source that cannot be compiled; the message is the reason."""


class CompiledGrammar:
    """Implements Grammar for the grammar compiled from `source`.

    `start` is the state at the beginning of an output and never advances: each matcher gets a copy. Copies
    share lazily built automata, under a lock. Once these automata have reached their maximum size, every
    output fails. `is_worn_out` is then set, and new requests need a newly compiled grammar.
    """

    def __init__(
        self, source: GrammarSource, start: LLMatcher, tokenizer: LLTokenizer, param: str = "grammar"
    ) -> None:
        self.source = source
        self.param = param
        self._start = start
        self._tokenizer = tokenizer
        self._worn_out = [False]  # shared by equal grammars

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompiledGrammar) and self._start is other._start

    def __hash__(self) -> int:
        return hash(id(self._start))

    @property
    def is_worn_out(self) -> bool:
        return self._worn_out[0]

    def named(self, param: str) -> CompiledGrammar:
        """Return an equal grammar with error messages that name the request field `param`."""
        named = CompiledGrammar(self.source, self._start, self._tokenizer, param)
        named._worn_out = self._worn_out
        return named

    def matcher(self) -> GrammarMatcher:
        matcher = CompiledMatcher(self)
        if self.source.budget is None:
            return matcher
        return BudgetedMatcher(matcher, self.source.budget, self._tokenizer)

    def new_state(self) -> LLMatcher:
        return self._start.deep_copy()

    def new_mask(self) -> npt.NDArray[np.uint32]:
        """Return memory for one bitmask, as the library writes it."""
        return np.zeros(-(-self._tokenizer.vocab_size // 32), np.uint32)

    def failure(self, reason: str) -> ConstraintError:
        """Return the error for an output that cannot continue; update `is_worn_out`."""
        self._worn_out[0] = bool(self.problem())
        message = (
            f"`{self.param}`: the {self.source.kind} failed {reason}; make it simpler or the output shorter"
        )
        return ConstraintError(message, self.param)

    def problem(self) -> str:
        """Return why no output can start with this grammar, else ""; builds the first automata.

        Tries an output of up to PROBED_TOKENS tokens, each the lowest token ID that the grammar allows.
        """
        probe = self._start.deep_copy()
        for _ in range(PROBED_TOKENS):
            if probe.is_stopped():
                break
            allowed = int.from_bytes(probe.compute_bitmask(), "little")
            lowest = (allowed & -allowed).bit_length() - 1
            if probe.is_error() or not probe.consume_token(max(lowest, 0)):
                break
        return error_of(probe)


class CompiledMatcher:
    """Implements GrammarMatcher."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.new_state()
        self._num_consumed = 0  # tokens of the output
        self._ahead: list[int] = []  # proposed tokens, consumed after the output
        self._is_known = False  # whether `_memory` has the tokens allowed after all consumed tokens

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> Bitmask:
        self._catch_up(generated, ahead)
        bitmask, address, num_octets = self._memory
        if not self._is_known:
            matcher = self._matcher
            matcher.unsafe_compute_mask_ptr(address, num_octets)
            if matcher.is_error():
                problem = f"after {len(generated) + len(ahead)} tokens: {error_of(matcher)}"
                raise self._grammar.failure(problem)
            self._is_known = True
        return bitmask

    @cached_property
    def _memory(self) -> tuple[memoryview, int, int]:
        """The matcher's bitmask, its address and its size. It is written anew for each position.

        The library would take five times as long to return the bitmask as `bytes`.
        """
        words = self._grammar.new_mask()
        return words.data.cast("B").toreadonly(), words.ctypes.data, words.nbytes

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        self._catch_up(generated, ())
        return self._matcher.compute_ff_tokens()

    def _catch_up(self, generated: Sequence[int], ahead: Sequence[int]) -> None:
        """Consume new and proposed tokens, after a rollback of earlier proposed tokens that were not kept.

        Raises ConstraintError if the grammar does not allow `ahead`.
        """
        if not ahead and not self._ahead:
            if (num_generated := len(generated)) > self._num_consumed:
                self._matcher.consume_tokens(list(generated[self._num_consumed :]))
                self._num_consumed, self._is_known = num_generated, False
            return
        if self._ahead and self._matcher.is_error():  # the library cannot roll back an error
            self._matcher = self._grammar.new_state()
            self._num_consumed, self._ahead, self._is_known = 0, [], False
        new, ahead = list(generated[self._num_consumed :]), list(ahead)
        num_alike = _num_alike([*new, *ahead], self._ahead)
        if num_alike < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - num_alike)
            self._is_known = False
        if num_alike < len(new):
            self._matcher.consume_tokens(new[num_alike:])
            self._is_known = False
        self._num_consumed = len(generated)
        self._ahead = ahead[: max(0, num_alike - len(new))]
        if len(self._ahead) < len(ahead):
            self._go_ahead(ahead)

    def _go_ahead(self, ahead: list[int]) -> None:
        """Consume the remaining proposed tokens.

        Raises ConstraintError if the grammar does not allow all of them; the matcher can still be used.
        """
        self._is_known = False
        begin = len(self._ahead)
        num_fitting = self._matcher.try_consume_tokens(ahead[begin:])
        self._ahead = ahead if self._matcher.is_error() else ahead[: begin + num_fitting]
        if len(self._ahead) < len(ahead):
            raise ConstraintError("the grammar does not allow the tokens that were proposed")


def compiled(source: GrammarSource, tokenizer: LLTokenizer) -> CompiledGrammar:
    """Compile a grammar. Callers must run on a stack of STACK_BYTES. Raises UnusableGrammar.

    Only the library's limits bound the time. If the library refuses the grammar, the non-strict schemas in
    the grammar are relaxed, and the result is compiled instead.
    """

    def check_of(lenient: bool) -> Check:
        return lambda schema: _schema_problem(schema, lenient, tokenizer)

    try:
        kept = with_equivalent_schemas(source, check_of)
        try:
            return _compiled(source, kept, tokenizer)
        except UnusableGrammar:
            if (looser := with_usable_schemas(kept, check_of)) == kept:
                raise
            return _compiled(source, looser, tokenizer)
    except ValueError as error:
        raise UnusableGrammar(str(error)) from None
    except RecursionError:
        raise UnusableGrammar("it nests too deeply") from None


def _compiled(source: GrammarSource, kept: GrammarSource, tokenizer: LLTokenizer) -> CompiledGrammar:
    try:
        matcher = LLMatcher(tokenizer, _grammar_of(kept), log_level=0, limits=_limits())
    except ValueError as error:
        raise UnusableGrammar(str(error)) from None
    grammar = CompiledGrammar(source, matcher, tokenizer)
    if problem := error_of(matcher) or grammar.problem():
        raise UnusableGrammar(problem)
    return grammar


def _schema_problem(schema: Schema, lenient: bool, tokenizer: LLTokenizer) -> str:
    """Return why the library cannot compile a schema, else "". `lenient` ignores unknown keywords."""
    source = schema_source(schema, is_compact=True)
    try:
        matcher = LLMatcher(tokenizer, _json_grammar(source, lenient), log_level=0, limits=_limits())
    except ValueError as error:
        return str(error)
    return error_of(matcher) or CompiledGrammar(source, matcher, tokenizer).problem()


def error_of(matcher: LLMatcher) -> str:
    """Return a matcher's error in one line, without the parser state that the library may append; else ""."""
    if not matcher.is_error():
        return ""
    text = matcher.get_error().partition("<state>")[0].partition("<non-verbose/>")[0]
    reason = " ".join(text.split())
    return _SHORT_REASONS.get(reason, reason)


def _grammar_of(source: GrammarSource) -> str:
    """Convert a grammar to the library's input format. Raises ValueError."""
    match source.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json_grammar(source)
        case GrammarKind.REGEX:
            return grammar_from("regex", source.text)
        case GrammarKind.EBNF:
            return grammar_from("lark", _lark_of(source.text))
        case GrammarKind.LARK:
            return grammar_from("lark", source.text)


def _lark_of(text: str) -> str:
    """Convert a grammar from GBNF to Lark; return Lark unchanged. Raises ValueError."""
    if _IS_LARK.search(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library's parser may raise anything
        raise ValueError(f"Failed to convert the grammar from GBNF to Lark: {error}") from error


def _json_grammar(source: GrammarSource, lenient: bool = False) -> str:
    """Convert a schema to the library's input format. The options override `x-guidance` in the schema."""
    white_space = None if source.is_compact else WHITE_SPACE
    return LLMatcher.grammar_from_json_schema(
        source.text,
        overrides={
            "lenient": lenient,
            "coerce_one_of": False,
            "whitespace_flexible": not source.is_compact,
            "whitespace_pattern": white_space,
        },
    )


def _limits() -> LLParserLimits:
    """Return limits that bound a mask's time by tens of milliseconds; usual schemas take microseconds."""
    return LLParserLimits(
        max_grammar_size=100_000,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=25_000,
        verbose_errors=False,
    )


def _num_alike(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False)))
