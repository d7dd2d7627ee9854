"""The invocations to time: batches as a server creates them, with pages in shuffled order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.buckets import Buckets
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch before pages are assigned: `rows` tasks of `new_tokens` each, ending at `context - 1`."""

    family: EntryFamily
    rows: int
    new_tokens: int
    context: int

    def pages(self, stride: int) -> int:
        return self.rows * -(-self.context // stride)


@dataclass(frozen=True, slots=True)
class Case:
    """A plan, its batch, and the entry that the runner selects for it."""

    entry: str
    plan: Plan
    batch: Batch


def plans(
    config: ModelConfig, contexts: Sequence[int], prompt_tokens: Sequence[int], *, has_extend: bool
) -> Iterator[Plan]:
    """Yield every decode batch size at every context, and prefill and extend at every prompt length.

    Lengths beyond the model's context are skipped.
    """
    for context in contexts:
        for rows in config.decode_batch_sizes:
            if context <= config.max_seq_len:
                yield Plan(EntryFamily.DECODE, rows, 1, context)
    for tokens in prompt_tokens:
        if tokens > config.max_seq_len:
            continue
        for rows in config.prefill_batch_sizes:
            yield Plan(EntryFamily.PREFILL, rows, tokens, tokens)
        if has_extend:
            yield Plan(EntryFamily.EXTEND, 1, tokens, tokens)


def choose(all_plans: Iterable[Plan], buckets: Buckets, stride: int, patterns: Sequence[str]) -> list[Case]:
    """Return cases for the plans with an entry that matches a shell-style pattern, or all without patterns.

    Raises InvalidRequestError if no case remains.
    """
    cases = [_make_case(plan, buckets, stride) for plan in all_plans]
    found = [case for case in cases if not patterns or any(fnmatchcase(case.entry, p) for p in patterns)]
    if not found:
        names = ", ".join(sorted({case.entry for case in cases})) or "none of such lengths"
        raise InvalidRequestError(f"no entry matches {', '.join(patterns)}; there are {names}", "entry")
    return found


def _make_case(plan: Plan, buckets: Buckets, stride: int) -> Case:
    batch = make_batch(plan, stride)
    return Case(buckets.nearest(batch).entry, plan, batch)


def make_batch(plan: Plan, stride: int) -> Batch:
    """Create a batch with the lowest page ids after the scratch page, in shuffled order."""
    page_ids = list(range(1, 1 + plan.pages(stride)))
    random.Random(0).shuffle(page_ids)
    per_row = len(page_ids) // plan.rows
    tasks = [_task(plan, page_ids[row * per_row : (row + 1) * per_row]) for row in range(plan.rows)]
    return Batch(plan.family, tuple(tasks))


def _task(plan: Plan, page_ids: list[int]) -> LlmTaskInput:
    token_ids = [1 + position % 97 for position in range(plan.context)]
    call = GenerateCall(
        request_id="roofline", prompt_token_ids=tuple(token_ids), params=SamplingParams(max_tokens=1)
    )
    start = plan.context - plan.new_tokens
    return LlmTaskInput(Request(call), token_ids[start:], start, plan.context, page_ids, page_ids)
