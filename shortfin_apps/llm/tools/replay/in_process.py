"""Replays receipts under various schedules, on engines in this process that serve no other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.artifact.verification import verifying
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.grammar.compiler import GrammarCompiler
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.runtime.open import host_of, open_device
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import ModelFacts, make_engine
from shortfin_apps.llm.serving.receipts.draft import identity_of
from shortfin_apps.llm.serving.receipts.receipt import Receipt, ReceiptError
from shortfin_apps.llm.serving.receipts.sampling import RecordedSampling
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer, bad_word_ids, first_out_of_range
from shortfin_apps.llm.tools.replay.compare import Outcome, computed_again, difference, other_model

CHUNK_PAGES = 1  # chunk size of a chunked schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How to compute an answer again.

    `is_warm`: all full pages of prompt and output are already in the prefix cache. `fills_batch`: other
    requests run in the same steps. `is_chunked`: prompts are computed one page at a time. `preempts`: each
    request is preempted after the first token, and again after half of its tokens.
    """

    name: str
    mode: BatchModeName = "default"
    is_warm: bool = False
    fills_batch: bool = False
    is_chunked: bool = False
    preempts: bool = False

    @property
    def suits_any_model(self) -> bool:
        """Whether the schedule needs only entries that every model has."""
        return self.mode == "default" and not self.is_chunked

    @property
    def prefix_cache(self) -> PrefixCache:
        return "trie" if self.is_warm else "none"

    def mode_options(self, config: ModelConfig) -> BatchSettings:
        chunk_tokens = CHUNK_PAGES * config.stride if self.is_chunked else None
        budget = None if chunk_tokens is None else chunk_tokens + config.stride
        return BatchSettings(batch_mode=self.mode, chunk_tokens=chunk_tokens, token_budget=budget)


EXTEND: Final = "extend-attention"
SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="alone"),
        Schedule(name="warm", is_warm=True),
        Schedule(name="full-batch", fills_batch=True),
        Schedule(name="chunked", is_chunked=True),
        Schedule(name="preempted", preempts=True),
        Schedule(name=EXTEND, mode=EXTEND),
        Schedule(name=f"{EXTEND}-full-batch", mode=EXTEND, fills_batch=True),
        Schedule(name=f"{EXTEND}-preempted", mode=EXTEND, preempts=True),
    )
}


FULL_BATCH = 8  # requests in a step, filled up with companions (random prompts below COMPANION_TOKENS)
COMPANION_TOKENS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An open artefact, and the receipts to replay with the sampling parameters of each."""

    artifact: Artifact
    device: Device
    device_name: str
    eos_token_ids: frozenset[int]
    vocab_size: int
    receipts: Sequence[Receipt]
    params: Sequence[SamplingParams]


@contextmanager
def opened(directory: Path, receipts: Sequence[Receipt], device_name: str = "cpu") -> Iterator[Subject]:
    """Open an artefact and a device to replay receipts on.

    Raises ArtifactError, and ReceiptError if a receipt is of another model or impossible for this model.
    """
    artifact = Artifact.open(directory, host=host_of(device_name))
    _check_model(artifact, receipts)
    tokenizer = Tokenizer.load(artifact.tokenizer, artifact.tokenizer_config)
    for receipt in receipts:
        _check_size(receipt, artifact, tokenizer)
    params = asyncio.run(_all_params(receipts, tokenizer))
    with verifying(artifact, "hash") as confirm:
        device = open_device(device_name, "auto")
        try:
            confirm()
            yield Subject(
                artifact=artifact,
                device=device,
                device_name=device_name,
                eos_token_ids=tokenizer.eos_token_ids,
                vocab_size=tokenizer.vocab_size,
                receipts=receipts,
                params=params,
            )
        finally:
            device.close()


def replay(subject: Subject, schedule: Schedule) -> Outcome:
    """Replay every answer under the schedule, or skip it if the model lacks the entries for it.

    Raises ArtifactError if the model cannot run.
    """
    outcome = Outcome(schedule.name, len(subject.receipts))
    size = FULL_BATCH if schedule.fills_batch else 1
    try:
        run = _Run(_engine(subject, schedule, size), schedule, subject)
    except ArtifactError as error:
        if schedule.suits_any_model:
            raise
        outcome.skipped = str(error)
        return outcome
    for begin in range(0, len(subject.receipts), size):
        indices = range(begin, min(begin + size, len(subject.receipts)))
        for index, found in zip(indices, run.answers(indices, size), strict=True):
            receipt = subject.receipts[index]
            again = computed_again(receipt, found.token_ids, found.logits, found.finish)
            outcome.add(index, found.error or difference(receipt, again))
    outcome.details |= run.details()
    return outcome


@dataclass(slots=True)
class _Answer:
    """An answer in progress. It is done when it finishes or has `wanted` tokens."""

    wanted: int
    token_ids: list[int] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    num_cached: int = 0

    @property
    def is_done(self) -> bool:
        return self.finish is not None or len(self.token_ids) >= self.wanted

    def add(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        self.logits += [each.logit for each in delta.logits]
        self.num_cached = max(self.num_cached, delta.num_cached_tokens)
        self.finish = delta.finish_reason
        if delta.error is not None:
            self.error = f"failed: {delta.error}"


class _Run:
    """Runs one schedule on an engine of its own."""

    def __init__(self, engine: Engine, schedule: Schedule, subject: Subject) -> None:
        self._engine = engine
        self._schedule = schedule
        self._subject = subject
        self._random = Random(0)  # for companions
        self._num_cached = 0

    def answers(self, indices: range, size: int) -> list[_Answer]:
        """Compute the answers of the receipts `indices`, in a batch filled up to `size` with companions."""
        if self._schedule.is_warm:
            self._run(indices, 1)
        found = self._run(indices, size)
        self._num_cached += sum(answer.num_cached for answer in found)
        return found

    def details(self) -> dict[str, int]:
        """Return counts that prove what the schedule did: cached tokens, preemptions."""
        counts = {"cached_tokens": self._num_cached} if self._schedule.is_warm else {}
        preemptions = self._engine.stats().preemptions
        return counts | ({"preemptions": preemptions} if self._schedule.preempts else {})

    def _run(self, indices: range, size: int) -> list[_Answer]:
        answers = {str(index): _Answer(len(self._subject.receipts[index].output_ids)) for index in indices}
        for index in indices:
            if not answers[str(index)].is_done:
                self._engine.add(self._call(index))
        longest = max(answer.wanted for answer in answers.values())
        companions = [f"companion {number}" for number in range(size - len(indices))]
        for name in companions:
            self._engine.add(self._companion(name, longest))
        while not all(answer.is_done for answer in answers.values()):
            self._step(answers)
        for name in companions:
            self._engine.abort(name)
        return list(answers.values())

    def _step(self, answers: dict[str, _Answer]) -> None:
        for delta in self._engine.step():
            if (answer := answers.get(delta.request_id)) is None or answer.is_done:
                continue
            answer.add(delta)
            if answer.is_done:
                self._engine.abort(delta.request_id)
            elif self._schedule.preempts and len(answer.token_ids) in (1, answer.wanted // 2):
                self._engine.preempt(delta.request_id)

    def _call(self, index: int) -> GenerateCall:
        receipt, params = self._subject.receipts[index], self._subject.params[index]
        return GenerateCall(request_id=str(index), prompt_token_ids=receipt.prompt_ids, params=params)

    def _companion(self, name: str, max_tokens: int) -> GenerateCall:
        """Create a request with a random prompt, to fill up a batch."""
        length = self._random.randrange(1, COMPANION_TOKENS)
        prompt = tuple(self._random.randrange(self._subject.vocab_size) for _ in range(length))
        params = SamplingParams(max_tokens=max(1, max_tokens), temperature=0, ignore_eos=True)
        return GenerateCall(request_id=name, prompt_token_ids=prompt, params=params)


def _engine(subject: Subject, schedule: Schedule, size: int) -> Engine:
    """Create an engine. Raises ArtifactError if the model does not support the schedule."""
    artifact = subject.artifact
    config = artifact.config
    longest = max(len(r.prompt_ids) + len(r.output_ids) for r in subject.receipts)
    tokens = max(longest, COMPANION_TOKENS + longest) if size > 1 else longest
    pages = 2 + (size + 1) * (-(-tokens // config.stride) + 2)
    options = EngineSettings(
        device=subject.device_name,
        batching=schedule.mode_options(config),
        prefix_cache=schedule.prefix_cache,
        pages=pages,
        max_running=size,
    )
    facts = ModelFacts(vocab_size=artifact.vocab_size, tokenizer_vocab_size=subject.vocab_size)
    files = artifact.vmfb, artifact.parameters
    return make_engine(subject.device, config, *files, subject.eos_token_ids, options, facts)


def _check_model(artifact: Artifact, receipts: Sequence[Receipt]) -> None:
    identity = identity_of(artifact)
    assert identity is not None, "a directory has a manifest"
    for number, receipt in enumerate(receipts, 1):
        if (differing := other_model(receipt, identity)) is not None:
            raise ReceiptError(f"receipt {number} is of another model: {differing}")


def _check_size(receipt: Receipt, artifact: Artifact, tokenizer: Tokenizer) -> None:
    """Raise ReceiptError for tokens outside of the vocabulary, an empty prompt, or too many tokens."""
    token_ids = (*receipt.prompt_ids, *receipt.output_ids)
    bad_id = first_out_of_range(token_ids, tokenizer.vocab_size)
    if not receipt.prompt_ids or bad_id is not None or len(token_ids) > artifact.config.max_seq_len:
        raise ReceiptError("the receipt's tokens are none that this model can have read or written")


async def _all_params(receipts: Sequence[Receipt], tokenizer: Tokenizer) -> list[SamplingParams]:
    grammars = GrammarCompiler(tokenizer.to_json, tokenizer.eos_token_ids)
    return [await _params(receipt, tokenizer, grammars) for receipt in receipts]


async def _params(receipt: Receipt, tokenizer: Tokenizer, grammars: GrammarCompiler) -> SamplingParams:
    recorded = RecordedSampling.parse(receipt.sampling)
    outputs, grammar = recorded.structured_outputs, None
    if outputs is not None:
        grammar = await grammars.compile(outputs.source(), "structured_outputs")
    return recorded.params(lambda words: bad_word_ids(tokenizer, tuple(words)), grammar)
