"""Compiles grammars for one tokenizer, in a thread of its own, within bounds of size and time.

A request that asks for much is refused by one of the bounds: the source's length, the library's limits on a
grammar's size and on the work of a step, or the time that a caller waits.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from shortfin_apps.llm.components.grammar.compiled import CompiledGrammar, error_of
from shortfin_apps.llm.components.grammar.source import GrammarKind, GrammarSource
from shortfin_apps.llm.errors import InvalidRequestError, OverloadedError

MAX_CHARS = {  # rules may refer to each other in a chain as long as the text, which STACK_BYTES must hold
    GrammarKind.JSON_SCHEMA: 65_536,
    GrammarKind.REGEX: 16_384,
    GrammarKind.EBNF: 32_768,
    GrammarKind.LARK: 65_536,
}
MAX_RULES = 300  # the time to report an error in a chain of rules grows with the cube of its length
MAX_REASON_CHARS = 300
TIMEOUT_S = 5.0
STACK_BYTES = 256 << 20  # reserved, not used: the library recurses along references
MAX_KEPT = 32
# At most so much white space in a row, lest a weak model go on with it until its tokens are used up.
WHITE_SPACE = r"[ \n\t]{1,32}"


class GrammarCompiler:
    """Compiles in one thread; the last MAX_KEPT grammars are kept. Not for several event loops.

    `tokenizer_json` returns the text of a `tokenizer.json`, whose tokens `eos_token_ids` end an output.
    """

    def __init__(self, tokenizer_json: Callable[[], str], eos_token_ids: Iterable[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[GrammarSource, CompiledGrammar] = OrderedDict()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return _deep_pool()

    def prepare(self) -> None:
        """Reads the tokenizer, which holds the GIL for a second: before there are requests.

        A tokenizer that the library cannot read is named when a request needs it.
        """
        self._pool.submit(self._read_tokenizer).exception()

    async def compile(self, source: GrammarSource, param: str) -> CompiledGrammar:
        """Raises InvalidRequestError with the reason, naming the field `param`, or OverloadedError."""
        _check_size(source, param)
        if source in self._kept:
            self._kept.move_to_end(source)
            return self._kept[source]
        compiled = await self._within_time(self._pool.submit(self._compile, source, param), param)
        self._kept[source] = compiled
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return compiled

    async def _within_time(self, compiling: Future[CompiledGrammar], param: str) -> CompiledGrammar:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(compiling), TIMEOUT_S)
        except TimeoutError:
            if compiling.cancelled():
                raise OverloadedError("other requests' grammars are being compiled; try again") from None
            raise InvalidRequestError(
                f"`{param}` takes more than {TIMEOUT_S:g} s to compile; simplify it", param
            ) from None

    def _compile(self, source: GrammarSource, param: str) -> CompiledGrammar:
        tokenizer = self._read_tokenizer()
        try:
            matcher = LLMatcher(tokenizer, _grammar_of(source), log_level=0, limits=_limits())
        except ValueError as error:
            raise _refused(str(error), source.kind, param) from None
        compiled = CompiledGrammar(matcher)
        if problem := error_of(matcher) or compiled.problem():
            raise _refused(problem, source.kind, param)
        return compiled

    def _read_tokenizer(self) -> LLTokenizer:
        """Raises InvalidRequestError for a model that cannot write by a grammar."""
        if self._tokenizer is not None:
            return self._tokenizer
        if not self._eos_token_ids:
            raise InvalidRequestError("this model has no end-of-sequence token, which grammars need")
        try:
            self._tokenizer = LLTokenizer(self._tokenizer_json(), eos_token=self._eos_token_ids)
        except Exception as error:  # the library raises what its parser does
            raise InvalidRequestError(f"this model's tokenizer has no grammars: {error}") from error
        return self._tokenizer


def _check_size(source: GrammarSource, param: str) -> None:
    limit = MAX_CHARS[source.kind]
    if len(source.text) > limit:
        raise InvalidRequestError(f"`{param}`: a {source.kind} may have at most {limit:,} characters", param)
    if source.kind is GrammarKind.EBNF and len(re.findall("::=|:", source.text)) > MAX_RULES:
        raise InvalidRequestError(f"`{param}`: a {source.kind} may have at most {MAX_RULES} rules", param)


def _grammar_of(source: GrammarSource) -> str:
    """The library's form of a grammar. Raises ValueError."""
    match source.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json_grammar(source)
        case GrammarKind.REGEX:
            return grammar_from("regex", source.text)
        case GrammarKind.EBNF:
            return grammar_from("ebnf", source.text)
        case GrammarKind.LARK:
            return grammar_from("lark", source.text)


def _json_grammar(source: GrammarSource) -> str:
    """A schema cannot change what is refused by an `x-guidance` of its own."""
    white_space = None if source.is_compact else WHITE_SPACE
    return LLMatcher.grammar_from_json_schema(
        source.text,
        overrides={
            "lenient": False,
            "coerce_one_of": False,
            "whitespace_flexible": not source.is_compact,
            "whitespace_pattern": white_space,
        },
    )


def _limits() -> LLParserLimits:
    """Masks then take tens of milliseconds at most; those of usual schemas take microseconds."""
    return LLParserLimits(
        max_grammar_size=100_000,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=25_000,
        verbose_errors=False,
    )


def _refused(reason: str, kind: GrammarKind, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{param}`: the {kind} cannot be used: {reason[:MAX_REASON_CHARS]}", param)


def _deep_pool() -> ThreadPoolExecutor:
    """A thread with a stack of STACK_BYTES; a setting of the process says so as it starts."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
    before = threading.stack_size(STACK_BYTES)
    try:
        pool.submit(int)  # starts the thread
    finally:
        threading.stack_size(before)
    return pool
