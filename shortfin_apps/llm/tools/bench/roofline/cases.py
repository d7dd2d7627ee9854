"""The invocations to time, and their minimum work.

A case is a batch as of a server, with page ids in shuffled order. The cost model of the roofline
counts:

    bytes  all weights once, with two exceptions: of the embedding table, only the rows of the batch's tokens
           (the whole table if it is also the head); of the routed experts, as many as one token uses.
           Of the KV cache: reading the pages of each task's earlier tokens, and writing K and V of its new
           tokens
    FLOPs  2 x tokens x elements of all matrices of all layers (experts: as many as a token uses);
           2 x sequences x elements of the head;
           attention: in each layer 4 x (p + 1) x head_dim x query heads for a token at position p

Activations and logits are not counted, as they can stay in the CPU's caches. Padding is not counted.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.buckets import Buckets
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.model.feed_forward import GatedExperts, SumExperts
from shortfin_apps.llm.model.operations import GatedLinear, Linear
from shortfin_apps.llm.model.spec import ModelSpec, weight_shapes


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch before its tasks get pages. `rows`: number of tasks; `new_tokens`: tokens of each task.

    The last token of each task is at position `context - 1`.
    """

    family: EntryFamily
    rows: int
    new_tokens: int
    context: int

    def pages(self, stride: int) -> int:
        return self.rows * -(-self.context // stride)


@dataclass(frozen=True, slots=True)
class Case:
    """A plan, its batch, and the name of the entry that computes this batch."""

    entry: str
    plan: Plan
    batch: Batch


class Choice(NamedTuple):
    """The cases to measure: patterns of entry names, context lengths of decodes, and prompt lengths.

    Patterns are shell-style; without patterns, all entries are measured. Lengths are in tokens.
    """

    patterns: Sequence[str]
    contexts: Sequence[int]
    prompt_tokens: Sequence[int]


def plans(config: ModelConfig, choice: Choice, *, has_extend: bool) -> Iterator[Plan]:
    """Yield a plan per decode batch size and context, and prefill and extend plans per prompt length.

    Lengths above the model's maximum context are skipped.
    """
    for context in choice.contexts:
        for rows in config.decode_batch_sizes:
            if context <= config.max_seq_len:
                yield Plan(EntryFamily.DECODE, rows, 1, context)
    for tokens in choice.prompt_tokens:
        if tokens > config.max_seq_len:
            continue
        for rows in config.prefill_batch_sizes:
            yield Plan(EntryFamily.PREFILL, rows, tokens, tokens)
        if has_extend:
            yield Plan(EntryFamily.EXTEND, 1, tokens, tokens)


def choose(all_plans: Iterable[Plan], buckets: Buckets, stride: int, patterns: Sequence[str]) -> list[Case]:
    """Return the cases whose entry matches one of the shell-style `patterns`, or all cases without patterns.

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
    """Create the plan's batch, with the page ids 1 to `plan.pages(stride)` in shuffled order."""
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


EMBEDDING = "token_embd.weight"
OF_EXPERTS = "_exps.weight"


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to move and FLOPs to compute in one invocation (a multiply-add is two FLOPs)."""

    num_bytes: int
    flops: int

    def floor_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Return the minimum time at these speeds, if memory traffic and computation fully overlap."""
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s)

    def is_memory_bound(self, bytes_per_s: float, flops_per_s: float) -> bool:
        return self.num_bytes / bytes_per_s >= self.flops / flops_per_s


class CostModel:
    """Computes the minimum work of a batch for one model, as the module docstring defines it.

    `parameter_bytes`: size of each parameter in the artefact, by name.
    """

    def __init__(self, spec: ModelSpec, config: ModelConfig, parameter_bytes: Mapping[str, int]) -> None:
        self._spec = spec
        self._stride = config.stride
        self._elements = self._matrix_elements()
        self._page_bytes = sum(config.page_elements) * config.paged_kv_cache.dtype.itemsize
        # The prefix also matches the scales of a block-quantised table.
        table = sum(size for name, size in parameter_bytes.items() if name.startswith(EMBEDDING))
        self._row_bytes = table // spec.vocab_size
        self._weight_bytes = sum(parameter_bytes.values()) - (0 if spec.tie_word_embeddings else table)
        if spec.experts is not None:
            experts = sum(size for name, size in parameter_bytes.items() if OF_EXPERTS in name)
            self._weight_bytes -= experts - experts * spec.experts.per_token // spec.experts.count

    def of(self, batch: Batch) -> Work:
        tokens = sum(len(task.token_ids) for task in batch.tasks)
        cache_bytes = sum(self._cache_bytes(task) for task in batch.tasks)
        attention = sum(self._attention_flops(task) for task in batch.tasks)
        head = self._spec.vocab_size * self._spec.hidden_size
        return Work(
            num_bytes=self._weight_bytes + tokens * self._row_bytes + cache_bytes,
            flops=2 * tokens * self._elements + 2 * len(batch.tasks) * head + attention,
        )

    def _matrix_elements(self) -> int:
        """Return the number of matrix elements that one token uses, without embedding and head."""
        shapes, elements = weight_shapes(self._spec), 0
        for operation in self._spec.operations():
            match operation:
                case Linear() | GatedLinear() if operation.weight != self._spec.head_weight:
                    elements += prod(shapes[operation.weight])
                case GatedExperts() | SumExperts():
                    assert self._spec.experts
                    elements += self._spec.experts.per_token * prod(shapes[operation.weight][1:])
        return elements

    def _cache_bytes(self, task: LlmTaskInput) -> int:
        pages_read = -(-task.start_position // self._stride)
        written = len(task.token_ids) * self._page_bytes // self._stride
        return pages_read * self._page_bytes + written

    def _attention_flops(self, task: LlmTaskInput) -> int:
        """Return the FLOPs of causal attention: number of (query, key) pairs x FLOPs of a pair."""
        pairs = (task.seq_len * (task.seq_len + 1) - task.start_position * (task.start_position + 1)) // 2
        return 4 * pairs * sum(block.attended_features for layer in self._spec.layers for block in layer)
