"""The requests of a dump, with their block tables as of the current record."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.components.kvcache.base import Lease
from shortfin_apps.llm.components.recorder.dump_file import DumpError
from shortfin_apps.llm.components.recorder.records import KnownRequest, Pages
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.request.sampling_params import SamplingParams


class ReplayedRequests:
    """Requests by number. The pages of requests in `unchecked` have not been checked yet."""

    def __init__(self, known: Sequence[KnownRequest]) -> None:
        self._requests = {each.number: _request(each) for each in known}
        self.unchecked = set(self._requests)

    def __getitem__(self, number: int) -> Request:
        return self._requests[number]

    def change(self, pages: Sequence[Pages]) -> None:
        """Apply changes to block tables. Raises DumpError for a change that leaves a gap."""
        for each in pages:
            request = self._requests[each.request]
            assert request.lease is not None, "it was given one"
            if not each.offset and not each.is_window:
                has_windows = request.lease.window_page_ids is not None
                request.lease = Lease([], [] if has_windows else None)
                self.unchecked.add(each.request)
            table = request.lease.window_page_ids if each.is_window else request.lease.page_ids
            if table is None or each.offset > len(table):
                raise DumpError(f"request {each.request} has a block table with a gap")
            table[each.offset :] = each.page_ids

    def tokens(self, number: int, end: int) -> list[int]:
        """Return the request's first `end` tokens. Raises DumpError if it has fewer."""
        token_ids = self._requests[number].token_ids
        if end > len(token_ids):
            raise DumpError(f"request {number} has no token at position {len(token_ids)}")
        return token_ids[:end]


def _request(known: KnownRequest) -> Request:
    call = GenerateCall(
        request_id=known.request_id,
        prompt_token_ids=tuple(known.token_ids),
        params=SamplingParams(max_tokens=1),
    )
    request = Request(call, arrival_s=known.arrival_s)
    windows = known.window_page_ids
    request.lease = Lease(list(known.page_ids), None if windows is None else list(windows))
    return request
