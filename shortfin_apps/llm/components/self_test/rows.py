"""Batch rows made of test prompts, with pages of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.self_test_file import DECODE_STEPS, TestPrompt

SALT = "self-test"  # of the leases; nothing is published, so no request finds these pages
_GREEDY = SamplingParams(max_tokens=1, temperature=0, seed=0)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A test prompt in a batch, which an entry computes from position `start` on, into the row's own pages.

    `own_page` is the block table column of the row's first own page. `summed` is the range of positions in
    this page for which the self-test's file has sums of K and V; None if there are none.
    """

    prompt: int
    token_ids: Sequence[int]
    start: int
    lease: Lease  # a copy of pages of other leases, not registered with the cache
    summed: tuple[int, int] | None
    own_page: int

    @property
    def decode(self) -> LlmTaskInput:
        """A task for the first position that the row computes."""
        return self.task(self.start, self.start + 1)

    def task(self, start: int, stop: int) -> LlmTaskInput:
        """Return a task for the positions `start .. stop - 1`."""
        request = Request(
            GenerateCall(request_id=SALT, prompt_token_ids=tuple(self.token_ids[: start + 1]), params=_GREEDY)
        )
        request.lease, request.num_computed = self.lease, start
        request.slot = -1  # rows of one invocation would share another slot's hidden states
        tokens = self.token_ids[start:stop]
        return LlmTaskInput(request, tokens, start, stop, self.lease.page_ids, self.lease.window_page_ids)


class TestPages:
    """Leases pages for rows of the test prompts; `release` returns all.

    Decoding rows share full prefix pages. Callers must compute the rows of `prefix_rows` once, before they
    run decoding rows.
    """

    __test__ = False  # not a pytest class

    def __init__(self, runner: BatchRunner, cache: KVCache, prompts: Sequence[TestPrompt]) -> None:
        self._runner = runner
        self._cache = cache
        self._prompts = prompts
        self._prefixes: list[Lease] = []
        self._leases: list[Lease] = []

    def prefix_rows(self, base: int) -> list[Row] | None:
        """Return a row of each prompt with pages for `base` tokens; None if there are too few pages."""
        rows = []
        for prompt in range(len(self._prompts)):
            if (lease := self._leased(self._prefixes, base)) is None:
                return None
            rows.append(self._row(prompt, 0, _view(lease, None, 0), None))
        return rows

    def decoding(self, count: int, bases: Sequence[int]) -> list[Row]:
        """Return up to `count` decoding rows, as many as pages allow, of all prompts and start positions.

        `bases` are the start positions. Prompts change from row to row, start positions after all prompts.
        """
        rows: list[Row] = []
        for index in range(count):
            prompt = index % len(self._prompts)
            base = bases[index // len(self._prompts) % len(bases)]
            if (own := self._leased(self._leases, DECODE_STEPS)) is None:
                break
            prefix = self._prefixes[prompt] if base else None
            view = _view(own, prefix, base // self._cache.stride)
            rows.append(self._row(prompt, base, view, (base, base + 1)))
        return rows

    def prefilling(self, count: int) -> list[Row]:
        """Return up to `count` rows, each of which prefills one prompt completely; fewer if pages run out."""
        rows: list[Row] = []
        for index in range(count):
            prompt = index % len(self._prompts)
            length = len(self._prompts[prompt].token_ids)
            if (own := self._leased(self._leases, length)) is None:
                break
            rows.append(self._row(prompt, 0, _view(own, None, 0), (0, min(self._cache.stride, length))))
        return rows

    def _row(self, prompt: int, start: int, view: Lease, summed: tuple[int, int] | None) -> Row:
        tokens = self._prompts[prompt].token_ids
        return Row(prompt, tokens, start, view, summed, own_page=start // self._cache.stride)

    def _leased(self, kept: list[Lease], num_tokens: int) -> Lease | None:
        lease = self._cache.acquire((), SALT)
        if not self._cache.reserve(lease, num_tokens):
            self._cache.release(lease)
            return None
        kept.append(lease)
        return lease

    def release_rows(self) -> None:
        """Zero the pages of all rows except the prefixes, and return the pages to the cache."""
        self._release(self._leases)

    def release(self) -> None:
        """Zero all pages, and return the pages to the cache."""
        self._release(self._leases)
        self._release(self._prefixes)

    def _release(self, leases: list[Lease]) -> None:
        page_ids = [page_id for lease in leases for page_id in lease.page_ids]
        window_ids = [page_id for lease in leases for page_id in lease.window_page_ids or ()]
        try:
            if leases:
                self._runner.clear_pages(page_ids, window_ids)
        finally:
            for lease in leases:
                self._cache.release(lease)
            leases.clear()


def _view(own: Lease, prefix: Lease | None, num_pages: int) -> Lease:
    """Return an unregistered lease of the first `num_pages` pages of `prefix`, then the pages of `own`."""
    if prefix is None:
        prefix = Lease(window_page_ids=[])
    windows = None
    if own.window_page_ids is not None:
        windows = [*(prefix.window_page_ids or ())[:num_pages], *own.window_page_ids]
    return Lease(page_ids=[*prefix.page_ids[:num_pages], *own.page_ids], window_page_ids=windows)
