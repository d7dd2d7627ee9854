"""Whose turn it is among tenants that wait: weighted fair sharing by tokens of service.

Each tenant has had a service, in tokens divided by its weight; the one with the least goes next. This is
the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with
the virtual time of fair queueing in place of their least counter: a tenant that begins to wait is set
to the time, so that it neither saves up service while it is away nor pays for what it got while nobody
else wanted it. The time advances by the service given, divided among the waiting tenants, and stays
between the least and the most served of them; so nobody is starved by a stream of new names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_REMEMBERED = 1024  # tenants that do not wait, but may come back while others still do


@dataclass(slots=True)
class _Account:
    service: float  # tokens / weight
    entered: int  # breaks ties: who has waited longer


class FairShare:
    """Accounts of the tenants; `weights` are positive, and 1 for who is not named."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._waiting: dict[str, _Account] = {}
        self._others: dict[str, float] = {}  # service of those who do not wait, longest away first
        self._waiting_weight = 0.0
        self._time = 0.0
        self._num_entered = 0

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def enter(self, tenant: str) -> None:
        """It has begun to wait."""
        self._keep_time()
        service = max(self._others.pop(tenant, 0.0), self._time)
        self._waiting[tenant] = _Account(service, self._num_entered)
        self._waiting_weight += self.weight(tenant)
        self._num_entered += 1

    def leave(self, tenant: str) -> None:
        """None of its requests waits any more. When nobody waits, nobody is owed anything."""
        account = self._waiting.pop(tenant)
        self._waiting_weight -= self.weight(tenant)
        if not self._waiting:
            self._others.clear()
            self._time = self._waiting_weight = 0.0
            return
        self._remember(tenant, account.service)

    def charge(self, tenant: str, tokens: int) -> None:
        """It was served; counted only while somebody waits."""
        service = tokens / self.weight(tenant)
        account = self._waiting.get(tenant)
        if account is not None:
            account.service += service
            self._time += tokens / self._waiting_weight
        elif self._waiting:
            self._remember(tenant, self._others.get(tenant, self._time) + service)

    def rank(self, tenant: str) -> tuple[float, int]:
        """The least comes first; `tenant` waits."""
        account = self._waiting[tenant]
        return account.service, account.entered

    def _remember(self, tenant: str, service: float) -> None:
        self._others[tenant] = service
        if len(self._others) > MAX_REMEMBERED:
            del self._others[next(iter(self._others))]

    def _keep_time(self) -> None:
        if self._waiting:
            services = [account.service for account in self._waiting.values()]
            self._time = min(max(self._time, min(services)), max(services))
