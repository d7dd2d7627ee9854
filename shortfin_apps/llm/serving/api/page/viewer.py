"""Restricts a snapshot of the engine to what one caller may see, and formats the rest for the page."""

from __future__ import annotations

from typing import Any, NamedTuple

from shortfin_apps.llm.components.engine.snapshot import (
    OWNED,
    UNLISTED,
    InvocationMix,
    PageMap,
    RequestSnapshot,
    Snapshot,
)
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.serving.http.access_log import claimed_tenant
from shortfin_apps.llm.serving.http.auth import Caller

COUNTERS = ("prompt_tokens", "cached_tokens", "generation_tokens", "steps", "device_s")


class Viewer(NamedTuple):
    """The viewer of a page: sees the requests of `tenant`, or all requests if `tenant` is None.

    `tenant` is None for admins, and for everyone if the server needs no API keys, because then everyone may
    abort any request. Without keys, clients choose tenant names freely, so names are shown as the hashes
    that appear in the log.
    """

    tenant: str | None
    is_admin: bool

    @classmethod
    def of(cls, caller: Caller) -> Viewer:
        return cls(None if caller.is_admin else caller.tenant or None, caller.is_admin)

    def view(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the visible part of the snapshot as a JSON object."""
        shown = [index for index, request in enumerate(snapshot.requests) if self._sees(request.tenant)]
        cells = {OWNED + index: OWNED + place for place, index in enumerate(shown)}
        window = snapshot.window_map
        return {
            "at": round(snapshot.at_s, 3),
            **_totals(snapshot.stats),
            "requests": [self._request(snapshot.requests[index]) for index in shown],
            "tenants": [
                (self._name(tenant), running, waiting)
                for tenant, running, waiting in snapshot.tenants
                if self._sees(tenant)
            ],
            "map": _map(snapshot.page_map, cells),
            "window_map": None if window is None else _map(window, cells),
            "steps": [_step(mix) for mix in snapshot.invocations],
        }

    def _sees(self, tenant: str) -> bool:
        return self.tenant is None or tenant == self.tenant

    def _name(self, tenant: str) -> str:
        is_claimed = tenant and self.tenant is None and not self.is_admin
        return claimed_tenant(tenant) if is_claimed else tenant

    def _request(self, request: RequestSnapshot) -> dict[str, Any]:
        return {
            "id": request.request_id,
            "rid": client_id(request.request_id),
            "tenant": self._name(request.tenant),
            "state": request.state.value,
            "prompt": request.prompt_tokens,
            "cached": request.cached_tokens,
            "computed": request.computed_tokens,
            "output": request.output_tokens,
            "max": request.max_tokens,
            "pages": request.pages,
            "age": round(request.age_s, 2),
        }


def client_id(request_id: str) -> str:
    """Return the client's request id, which `/abort` accepts, without the engine's suffix (TextGenerator)."""
    return request_id.rpartition(".")[0]


def _totals(stats: EngineStats) -> dict[str, Any]:
    """Return the counters summed over all callers."""
    window = stats.window_pages
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "pages": stats.pages._asdict(),
        "window_pages": None if window is None else window._asdict(),
        "counters": {name: getattr(stats, name) for name in COUNTERS},
    }


def _map(pages: PageMap, cells: dict[int, int]) -> dict[str, Any]:
    """Return the page map; pages of hidden requests are marked as unlisted."""
    values = pages.runs[::2]
    shown = [value if value < OWNED else cells.get(value, UNLISTED) for value in values]
    runs = [number for pair in zip(shown, pages.runs[1::2], strict=True) for number in pair]
    return {"step": pages.step, "runs": runs}


def _step(mix: InvocationMix) -> tuple[Any, ...]:
    return (
        mix.serial,
        round(mix.at_s, 4),
        round(mix.duration_s, 4),
        mix.entry,
        mix.entry_class.value,
        mix.prefill_tokens,
        mix.decode_tokens,
        mix.padded_tokens,
    )
