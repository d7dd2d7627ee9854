"""Bounds the time that grammars take of a step.

The library bounds the work for one mask, not the sum over a batch: 30 rows of a costly grammar would make
every other request wait. Requests of one tenant with one grammar share an account. When masks have taken
too long for several steps, the requests of the costliest accounts end with an error, until the others fit.

    all masks of a step      MAX_STEP_S; successive steps may exceed it by MAX_EXCESS_S in sum
    one account's of a step  MAX_EXCESS_S; then all its requests of the step end
    always allowed           MIN_ROW_S per row, so that large batches of usual grammars never fail

An account's cost is its mean over NUM_STEPS steps without the NUM_SPIKES costliest: the first masks of a new
grammar are slow, and its requests must not fail because of these.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from shortfin_apps.llm.components.request.grammar import Grammar, GrammarMatcher
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.errors import ConstraintError

MAX_STEP_S = 0.025
MAX_EXCESS_S = 0.25
MIN_ROW_S = 0.001
NUM_STEPS = 8
NUM_SPIKES = 3


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Account:
    """The masks of one tenant's requests with one grammar. Lives as long as one of the requests."""

    param: str
    request_ids: set[str] = field(default_factory=set)  # of the current step
    spent_s: float = 0.0  # in the current step
    cost_s: float = 0.0  # per step
    per_row_s: float = 0.0
    _steps_s: deque[float] = field(default_factory=lambda: deque([0.0] * NUM_STEPS, NUM_STEPS))

    @property
    def is_exhausted(self) -> bool:
        """Whether it may take no more time in this step."""
        return self.spent_s > MAX_EXCESS_S

    def settle(self) -> None:
        """Takes the current step into the cost."""
        self._steps_s.append(self.spent_s)
        usual_s = sorted(self._steps_s)[: NUM_STEPS - NUM_SPIKES]
        self.cost_s = sum(usual_s) / len(usual_s)
        self.per_row_s = self.cost_s / len(self.request_ids)

    def begin_step(self) -> None:
        self.request_ids, self.spent_s = set(), 0.0

    def error(self) -> ConstraintError:
        return ConstraintError(
            f"`{self.param}`: the grammar takes so long for each token that it slows down other requests;"
            " make it simpler and less ambiguous, or ask for fewer choices at once",
            self.param,
        )


class MaskCosts:
    """Measures the grammars of one engine. `clock` is the processor time of the thread that steps it."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._accounts: WeakValueDictionary[tuple[str, Grammar], _Account] = WeakValueDictionary()
        self._of_step: set[_Account] = set()
        self._excess_s = 0.0

    def watch(self, request: Request) -> None:
        """Has the time of the request's masks measured, if it has a grammar."""
        grammar = request.call.params.output_grammar
        if request.matcher is None or grammar is None:
            return
        key = (request.tenant, grammar)
        if (account := self._accounts.get(key)) is None:
            account = self._accounts[key] = _Account(grammar.param)
        request.matcher = _WatchedMatcher(request.matcher, request.request_id, account, self)

    def settle(self) -> list[tuple[str, ConstraintError]]:
        """Ends a step. Returns the ids of requests that have to end, with their errors."""
        accounts, self._of_step = self._of_step, set()
        spent_s = sum(account.spent_s for account in accounts)
        self._excess_s = min(max(0.0, self._excess_s + spent_s - MAX_STEP_S), MAX_EXCESS_S)
        too_costly = [account for account in accounts if account.is_exhausted]
        for account in accounts:
            account.settle()
        if not too_costly and self._excess_s == MAX_EXCESS_S:
            too_costly = _costliest(accounts)
        ended = [(name, account.error()) for account in too_costly for name in sorted(account.request_ids)]
        for account in accounts:
            account.begin_step()
        return ended

    @contextmanager
    def measured(self, account: _Account, request_id: str) -> Iterator[None]:
        """Charges the account for the time of a block."""
        self._of_step.add(account)
        account.request_ids.add(request_id)
        began_s = self._clock()
        try:
            yield
        finally:
            account.spent_s += self._clock() - began_s


class _WatchedMatcher:
    """A GrammarMatcher that charges an account."""

    def __init__(self, matcher: GrammarMatcher, request_id: str, account: _Account, costs: MaskCosts) -> None:
        self._matcher, self._request_id = matcher, request_id
        self._account, self._costs = account, costs

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        if self._account.is_exhausted:
            raise self._account.error()
        with self._costs.measured(self._account, self._request_id):
            return self._matcher.allowed(generated, ahead)

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        if self._account.is_exhausted:
            return ()
        with self._costs.measured(self._account, self._request_id):
            return self._matcher.forced(generated)


def _costliest(accounts: Iterable[_Account]) -> list[_Account]:
    """The accounts without which the other costly ones take no more than MAX_STEP_S."""
    costly = [account for account in accounts if account.per_row_s > MIN_ROW_S]
    left_s, chosen = sum(account.cost_s for account in costly), []
    for account in sorted(costly, key=lambda account: account.cost_s, reverse=True):
        if left_s <= MAX_STEP_S:
            break
        chosen.append(account)
        left_s -= account.cost_s
    return chosen
