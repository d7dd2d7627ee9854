"""Compiles grammars for one tokenizer, within limits of size, time and memory.

An expensive grammar is refused by the limit on its source's length, by the library's limits on a grammar's
size and on the work per step, or by the trial process's limits on time and memory. A compiled grammar cannot
be sent between processes. Therefore each grammar is compiled twice: first in a process that can be killed (a
trial), then in this process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import TypeVar

from llguidance import LLTokenizer

from shortfin_apps.llm.components.grammar.compiled import (
    STACK_BYTES,
    CompiledGrammar,
    UnusableGrammar,
    compiled,
)
from shortfin_apps.llm.components.grammar.fair_turns import FairTurns
from shortfin_apps.llm.components.grammar.source import GrammarKind, GrammarSource, check_size
from shortfin_apps.llm.components.grammar.trial_process import TrialLimits
from shortfin_apps.llm.components.grammar.trials import MAX_AT_ONCE, Refusals, Trials
from shortfin_apps.llm.contract.errors import InvalidRequestError, OverloadedError, is_library_error

MAX_REASON_CHARS = 300
TIMEOUT_S = 5.0  # maximum wait for other requests' grammars to compile
MAX_KEPT = 32
# Advice in the library's errors on options that no request can set, and the text that replaces it.
ADVICE = {
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf": "`anyOf` allows what fits one or several"
}

logger = logging.getLogger(__name__)

T = TypeVar("T")


class GrammarCompiler:
    """Compiles grammars for one event loop; caches the last MAX_KEPT grammars and the reasons of refusals.

    Tenants take turns. `tokenizer_json` returns the contents of a `tokenizer.json`; `eos_token_ids` are the
    tokens that end an output.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        eos_token_ids: Iterable[int],
        limits: TrialLimits | None = None,
    ) -> None:
        self._limits = limits or TrialLimits()
        self._tokenizer_json = tokenizer_json
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._trials: Trials | None = None
        self._kept: OrderedDict[GrammarSource, CompiledGrammar] = OrderedDict()
        self._refusals = Refusals()
        self._trial_turns = FairTurns(MAX_AT_ONCE)
        self._turns = FairTurns(1)  # for the thread

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return _deep_pool()

    @contextmanager
    def preparing(self, *, trials: bool = True) -> Iterator[None]:
        """Read the tokenizer while the caller's block runs; wait at the end of the block until it is read.

        Callers must do this before they compile. Reading holds the GIL for a second or two. A tokenizer that
        the library cannot read is reported when a request needs a grammar. `trials=False` does not start the
        trial process: for callers that only use `compile_tried`.
        """
        read = self._pool.submit(self._read_tokenizer)
        yield
        if read.exception() is None and trials:
            self._pool.submit(self._start_trials)  # reads the tokenizer again, but no request waits for that

    def close(self) -> None:
        """End the trial process, and the compiling thread after its current work.

        Nothing is compiled afterwards.
        """
        self._pool.shutdown()
        if self._trials is not None:
            self._trials.close()

    async def compile_first(
        self, sources: Sequence[Callable[[], GrammarSource]], param: str, tenant: str = ""
    ) -> CompiledGrammar:
        """Compile the first of `sources` that is not refused. If all are, raises the last source's error."""
        *others, last = sources
        for make in others:
            with suppress(InvalidRequestError):
                return await self.compile(make(), param, tenant)
            await asyncio.sleep(0)  # let other requests run: making a source may take long
        return await self.compile(last(), param, tenant)

    async def compile(self, source: GrammarSource, param: str, tenant: str = "") -> CompiledGrammar:
        """Compile a grammar. Raises InvalidRequestError, naming the field `param`, or OverloadedError."""
        check_size(source, param)
        try:
            grammar = self._kept_grammar(source) or await self._tried(source, tenant)
        except UnusableGrammar as unusable:
            raise _refused(str(unusable), source.kind, param) from None
        except TimeoutError:
            raise OverloadedError("other requests' grammars are being compiled; try again") from None
        return grammar.named(param)

    async def compile_tried(self, source: GrammarSource, param: str, tenant: str = "") -> CompiledGrammar:
        """Compile a grammar without a trial. Raises the errors of `compile`.

        Another process of this server must have compiled the grammar before.
        """
        try:
            grammar = self._kept_grammar(source) or await self._compile_here(source, tenant)
        except UnusableGrammar as unusable:
            raise _refused(str(unusable), source.kind, param) from None
        except TimeoutError:
            raise OverloadedError("other requests' grammars are being compiled; try again") from None
        return grammar.named(param)

    def _kept_grammar(self, source: GrammarSource) -> CompiledGrammar | None:
        """Return a cached grammar or None. Raises UnusableGrammar if the grammar was refused before."""
        if (kept := self._kept.get(source)) is not None and not kept.is_worn_out:
            self._kept.move_to_end(source)
            return kept
        self._refusals.check(source)
        return None

    async def _tried(self, source: GrammarSource, tenant: str) -> CompiledGrammar:
        """Compile a grammar after a trial. Raises UnusableGrammar, or TimeoutError if it waits too long."""
        async with self._trial_turns.place(tenant, TIMEOUT_S):
            if (kept := self._kept_grammar(source)) is not None:  # compiled for an earlier request
                return kept
            trials = await self._running_trials()
            try:
                await trials.run(source)
            except UnusableGrammar as unusable:
                self._refusals.add(source, unusable)
                raise
            # Keeps its place until compiled, so that waiting requests find the grammar and need no trial.
            return await self._compile_here(source, tenant)

    async def _compile_here(self, source: GrammarSource, tenant: str) -> CompiledGrammar:
        async with self._turns.place(tenant, TIMEOUT_S):
            if (kept := self._kept_grammar(source)) is not None:
                return kept
            tokenizer = await self._in_thread(self._read_tokenizer)
            grammar = await self._in_thread(partial(compiled, source, tokenizer))
        self._kept[source] = grammar
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return grammar

    async def _running_trials(self) -> Trials:
        if self._trials is None or self._trials.are_over:
            await self._in_thread(self._read_tokenizer)
            try:
                return await self._in_thread(self._start_trials)
            except OSError as error:  # no more processes, files or memory
                logger.warning("grammars cannot be compiled: %s", error)
                raise OverloadedError("no grammar can be compiled now; try again") from None
        return self._trials

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in the compiling thread. A cancelled call keeps its turn until `work` has ended."""
        running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def _read_tokenizer(self) -> LLTokenizer:
        """Return the tokenizer, read at the first call.

        Raises InvalidRequestError for a model that cannot use grammars.
        """
        if self._tokenizer is not None:
            return self._tokenizer
        if not self._eos_token_ids:
            raise InvalidRequestError("this model has no end-of-sequence token, which grammars need")
        try:
            self._tokenizer = LLTokenizer(self._tokenizer_json(), eos_token=self._eos_token_ids)
        except BaseException as error:
            if isinstance(error, Exception) or is_library_error(error):  # the library may raise anything
                raise InvalidRequestError(f"this model's tokenizer has no grammars: {error}") from error
            raise
        return self._tokenizer

    def _start_trials(self) -> Trials:
        """Return the trial process, started at the first call and again if it has ended."""
        if self._trials is not None and self._trials.are_over:
            logger.warning("the process that compiles grammars has ended; starting it again")
            self._trials = None
        if self._trials is None:
            self._trials = Trials(self._tokenizer_json(), self._eos_token_ids, self._limits)
        return self._trials


def _refused(reason: str, kind: GrammarKind, param: str) -> InvalidRequestError:
    for theirs, ours in ADVICE.items():
        reason = reason.replace(theirs, ours)
    return InvalidRequestError(f"`{param}`: the {kind} cannot be used: {reason[:MAX_REASON_CHARS]}", param)


def _deep_pool() -> ThreadPoolExecutor:
    """Return a pool of one thread with a stack of STACK_BYTES.

    The stack size is a setting of the process that is read when a thread starts.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
    before = threading.stack_size(STACK_BYTES)
    try:
        pool.submit(int)  # starts the thread
    finally:
        threading.stack_size(before)
    return pool
