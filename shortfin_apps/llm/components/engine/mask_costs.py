"""Limits on the time of a step that is spent on grammar masks (bitmasks of allowed tokens).

The grammar library bounds the work for one mask, not the sum over a batch: 30 rows with a costly grammar
would delay every other request. Requests of one tenant with the same grammar share an account. If masks have
taken too long for several steps, requests end with an error, costliest accounts first, until the time of the
remaining accounts is within the limit.

    all masks of a step         MAX_STEP_S; consecutive steps may exceed this by MAX_EXCESS_S in total
    one account in a step       MAX_EXCESS_S; beyond, all requests of the account in the step end
    always allowed              MIN_ROW_S per row, so that large batches of ordinary grammars never fail
    one tenant in a step        MAX_STEP_S in addition to MIN_ROW_S per row; consecutive steps may exceed this
                                by MAX_DEBT_S in total

An account's cost is the mean over NUM_STEPS steps without the NUM_SPIKES costliest ones: the first masks of a
new grammar are slow, and this must not fail its requests. A tenant's debt is the time beyond the tenant's
limit, including these spikes, and is kept after requests end. Otherwise a series of short requests, each too
new to be known as costly, could take much of every step. A debt that exceeds MAX_DEBT_S is set to twice
MAX_DEBT_S, and takes at least 2 * MAX_DEBT_S / MAX_STEP_S steps to pay off.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from shortfin_apps.llm.components.engine.work_time import work_time
from shortfin_apps.llm.components.request.grammar import Bitmask, Grammar, GrammarMatcher, NextMask
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.errors import ConstraintError

MAX_STEP_S = 0.025
MAX_EXCESS_S = 0.25
MAX_DEBT_S = 2.0
MIN_ROW_S = 0.001
BRIEF_S = MIN_ROW_S / 10
NUM_STEPS = 8
NUM_SPIKES = 3


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Tenant:
    """A tenant's debt. The object lives as long as an account of the tenant, or while the debt is not 0."""

    debt_s: float = 0.0  # mask time beyond the limits

    @property
    def is_over_limit(self) -> bool:
        return self.debt_s > MAX_DEBT_S

    def settle(self, over_s: float) -> None:
        """Update the debt with a step that took `over_s` beyond MIN_ROW_S per row."""
        self.debt_s = max(0.0, self.debt_s + over_s - MAX_STEP_S)
        if self.is_over_limit and over_s > MAX_STEP_S:
            self.debt_s = 2 * MAX_DEBT_S


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Account:
    """Mask costs of one tenant's requests with one grammar; lives as long as one of these requests."""

    tenant: _Tenant
    params: dict[str, str] = field(default_factory=dict)  # Grammar.param by request ID, in the current step
    spent_s: float = 0.0  # in the current step
    cost_s: float = 0.0  # mean per step, without spikes
    per_row_s: float = 0.0  # mean per row, without spikes
    _steps_s: deque[float] = field(default_factory=lambda: deque([0.0] * NUM_STEPS, NUM_STEPS))
    _rows_s: deque[float] = field(default_factory=lambda: deque([0.0] * NUM_STEPS, NUM_STEPS))

    @property
    def is_exhausted(self) -> bool:
        """Whether the account may use no more time in this step."""
        return self.spent_s > MAX_EXCESS_S or (self.tenant.is_over_limit and self.over_s > MAX_STEP_S)

    @property
    def over_s(self) -> float:
        """Time used in the current step beyond MIN_ROW_S per row."""
        return max(0.0, self.spent_s - MIN_ROW_S * len(self.params))

    def settle(self) -> None:
        """Add the current step to the cost averages."""
        self._steps_s.append(self.spent_s)
        self._rows_s.append(self.spent_s / len(self.params))
        self.cost_s, self.per_row_s = _usual(self._steps_s), _usual(self._rows_s)

    def begin_step(self) -> None:
        self.params, self.spent_s = {}, 0.0


class MaskCosts:
    """Measures the grammars of one engine.

    `clock` is the CPU time of the thread that runs the steps. It takes a system call, so a call of a grammar
    is timed by `wall`; if it lasts longer than BRIEF_S, by the CPU time since `clock` was last read if that
    is less: the thread may have been interrupted. `clock` is read after each step.
    """

    def __init__(
        self,
        clock: Callable[[], float] = work_time,
        wall: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._read_s = -math.inf  # CPU time when it was last read
        self._accounts: WeakValueDictionary[tuple[str, Grammar], _Account] = WeakValueDictionary()
        self._of_step: set[_Account] = set()
        self._excess_s = 0.0
        self._tenants: WeakValueDictionary[str, _Tenant] = WeakValueDictionary()
        self._indebted: set[_Tenant] = set()

    def watch(self, request: Request) -> None:
        """Start measuring the request's mask time, if it has a grammar."""
        grammar = request.call.params.output_grammar
        if request.matcher is None or grammar is None:
            return
        key = (request.tenant, grammar)
        if (account := self._accounts.get(key)) is None:
            tenant = self._tenants.setdefault(request.tenant, _Tenant())
            account = self._accounts[key] = _Account(tenant)
        request.matcher = _WatchedMatcher(
            request.matcher, request.next_mask, request.request_id, grammar.param, account, self
        )

    def settle(self) -> list[tuple[str, ConstraintError]]:
        """End a step. Returns the IDs of requests that must end, with their errors."""
        self._read_s = self._clock()
        accounts, self._of_step = self._of_step, set()
        spent_s = sum(account.spent_s for account in accounts)
        self._excess_s = min(max(0.0, self._excess_s + spent_s - MAX_STEP_S), MAX_EXCESS_S)
        too_costly = [account for account in accounts if account.is_exhausted]
        for account in accounts:
            account.settle()
        if not too_costly and self._excess_s == MAX_EXCESS_S:
            too_costly = _costliest({each: each.cost_s for each in accounts if each.per_row_s > MIN_ROW_S})
        too_costly += self._in_debt(accounts)
        ended = [
            (name, _error(param)) for each in dict.fromkeys(too_costly) for name, param in each.params.items()
        ]
        for account in accounts:
            account.begin_step()
        return ended

    def _in_debt(self, accounts: Iterable[_Account]) -> list[_Account]:
        """Update the tenants' debts; return the costliest accounts of tenants over their limit."""
        over_s: dict[_Tenant, dict[_Account, float]] = {tenant: {} for tenant in self._indebted}
        for account in accounts:
            over_s.setdefault(account.tenant, {})[account] = account.over_s
        chosen: list[_Account] = []
        for tenant, costs_s in over_s.items():
            tenant.settle(sum(costs_s.values()))
            if tenant.is_over_limit:
                chosen += _costliest(costs_s)
        self._indebted = {tenant for tenant in over_s if tenant.debt_s}
        return chosen

    def begin(self, account: _Account, request_id: str, param: str) -> float:
        """Register a request of the account in this step, before it spends time; returns the current time."""
        self._of_step.add(account)
        account.params[request_id] = param
        return self._wall()

    def end(self, account: _Account, began_s: float) -> None:
        spent_s = self._wall() - began_s
        if spent_s > BRIEF_S:
            before_s, self._read_s = self._read_s, self._clock()
            spent_s = min(spent_s, self._read_s - before_s)
        account.spent_s += spent_s


class _WatchedMatcher:
    """A GrammarMatcher that charges its time to an account.

    If a draw waits for the request's next mask, the call that asks for forced tokens computes it as well, for
    one charge.
    """

    __slots__ = ("_account", "_costs", "_mask", "_matcher", "_param", "_request_id")

    def __init__(
        self,
        matcher: GrammarMatcher,
        mask: NextMask,
        request_id: str,
        param: str,
        account: _Account,
        costs: MaskCosts,
    ) -> None:
        self._matcher, self._mask, self._request_id, self._param = matcher, mask, request_id, param
        self._account, self._costs = account, costs

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> Bitmask:
        account = self._account
        if account.is_exhausted:
            raise _error(self._param)
        began_s = self._costs.begin(account, self._request_id, self._param)
        try:
            return self._matcher.allowed(generated, ahead)
        finally:
            self._costs.end(account, began_s)

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        account = self._account
        if account.is_exhausted:
            return ()
        began_s = self._costs.begin(account, self._request_id, self._param)
        try:
            forced, mask = self._matcher.forced(generated), self._mask
            if mask.is_awaited and not forced:
                with suppress(ConstraintError):  # `allowed` raises it again
                    mask.bitmask, mask.num_generated = self._matcher.allowed(generated), len(generated)
            return forced
        finally:
            self._costs.end(account, began_s)


def _usual(costs_s: Iterable[float]) -> float:
    """Return the mean cost without the NUM_SPIKES highest costs."""
    usual_s = sorted(costs_s)[: NUM_STEPS - NUM_SPIKES]
    return sum(usual_s) / len(usual_s)


def _error(param: str) -> ConstraintError:
    return ConstraintError(
        f"`{param}`: the grammar takes so long for each token that it slows down other requests; make it"
        " simpler and less ambiguous, or ask for fewer choices at once",
        param,
    )


def _costliest(costs_s: Mapping[_Account, float]) -> list[_Account]:
    """Return the fewest costliest accounts without which the others take at most MAX_STEP_S in total."""
    left_s, chosen = sum(costs_s.values()), []
    for account in sorted(costs_s, key=costs_s.__getitem__, reverse=True):
        if left_s <= MAX_STEP_S:
            break
        chosen.append(account)
        left_s -= costs_s[account]
    return chosen
