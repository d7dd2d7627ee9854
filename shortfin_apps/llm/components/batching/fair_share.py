"""Weighted fair sharing among tenants, by tokens of service.

Each tenant has a counter of service received: tokens divided by the tenant's weight. The waiting tenant with
the lowest counter is next. This is the virtual token counter of Sheng et al., "Fairness in Serving Large
Language Models" (OSDI 2024), with one change: when a tenant starts to wait, its counter is raised to the
virtual time of fair queueing, not to the minimum counter. A tenant therefore neither saves up service while
it is absent nor pays for service that no other tenant wanted. Virtual time advances by the tokens served
divided by the total weight of the waiting tenants. It is kept between the lowest and highest counter of these
tenants, so a sequence of new tenants starves no other tenant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_REMEMBERED = 1024  # maximum number of tenants without waiting requests that keep their counters


@dataclass(slots=True)
class _Account:
    service: float  # tokens / weight
    entered: int  # breaks ties: lower for a tenant that has waited longer


class FairShare:
    """Service counters of the tenants; `weights` must be positive (default: 1)."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._waiting: dict[str, _Account] = {}
        self._others: dict[str, float] = {}  # service of tenants that do not wait, longest absent first
        self._waiting_weight = 0.0
        self._time = 0.0
        self._num_entered = 0

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def enter(self, tenant: str) -> None:
        """Register a tenant that starts to wait."""
        self._bound_time()
        service = max(self._others.pop(tenant, 0.0), self._time)
        self._waiting[tenant] = _Account(service, self._num_entered)
        self._waiting_weight += self.weight(tenant)
        self._num_entered += 1

    def leave(self, tenant: str) -> None:
        """Record that a tenant has no waiting request any more. If no tenant waits, reset all counters."""
        account = self._waiting.pop(tenant)
        self._waiting_weight -= self.weight(tenant)
        if not self._waiting:
            self._others.clear()
            self._time = self._waiting_weight = 0.0
            return
        self._remember(tenant, account.service)

    def charge(self, tenant: str, tokens: int) -> None:
        """Add `tokens` to the tenant's service; no effect while no tenant waits."""
        service = tokens / self.weight(tenant)
        account = self._waiting.get(tenant)
        if account is not None:
            account.service += service
            self._time += tokens / self._waiting_weight
        elif self._waiting:
            self._remember(tenant, self._others.get(tenant, self._time) + service)

    def rank(self, tenant: str) -> tuple[float, int]:
        """Return the sort key of a waiting tenant; the tenant with the lowest key is next."""
        account = self._waiting[tenant]
        return account.service, account.entered

    def _remember(self, tenant: str, service: float) -> None:
        self._others[tenant] = service
        if len(self._others) > MAX_REMEMBERED:
            del self._others[next(iter(self._others))]

    def _bound_time(self) -> None:
        if self._waiting:
            services = [account.service for account in self._waiting.values()]
            self._time = min(max(self._time, min(services)), max(services))
