"""Schedules of requests and one fault on an emulated GPU, each drawn from a seed and run on a whole engine.

A GPU's failure may end the process, so they run in processes of their own: `python -m
tests.integration.hip_fault_schedule WORKLOAD SEED...` prints the name of each before it runs, and what came
of it. No wait is unbounded: one that is too long is a failure of the schedule.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from emulated_gpu.control import Control
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.request.messages import FinishReason, GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.errors import DeviceLostError, LlmError, UnavailableError
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.serving.loading import load_engine
from tests.hip import CHIPS, describe
from tests.integration.generation import Continuation, assert_same

# Of logits: the expected tokens are the CPU's, which rounds to bf16 at other places (test_hip_entries.py says
# how far that may go).
TOLERANCE = 0.2
MAX_TOKENS = 3
MAX_REQUESTS = 6
PATIENCE_S = 60.0
ENDED = "  ->"  # begins the line after a schedule
STALL_TIMEOUT_S = 3.0
NUM_PROBES = 2
UNANSWERED = "has not answered"
FINAL = "restart the server"  # what every error after a failure of the GPU says

FaultKind = Literal["refused call", "failed launch", "out of memory", "stall", "long stall", "lost", "none"]
REFUSABLE = (
    "hipModuleLaunchKernel",
    "hipMemcpyAsync",
    "hipMemsetD8Async",
    "hipMemsetD32Async",
    "hipEventRecord",
    "hipStreamWaitEvent",
    "hipEventCreateWithFlags",
    "hipLaunchHostFunc",
)
ERRORS = (1, 719, 999)  # hipErrorInvalidValue, hipErrorLaunchFailure, hipErrorUnknown


@dataclass(frozen=True)
class Workload:
    """Artefacts by chip, prompts, and what follows each on the CPU."""

    artefacts: dict[str, str]
    prompts: list[list[int]]
    expected: list[Continuation]

    @classmethod
    def read(cls, path: Path) -> Workload:
        content = json.loads(path.read_text())
        expected = [Continuation(tuple(e["token_ids"]), tuple(e["gaps"])) for e in content["expected"]]
        return cls(content["artefacts"], content["prompts"], expected)


@dataclass(frozen=True)
class Answer:
    """The output of a request, and the error that ended it, if one did."""

    prompt: int
    token_ids: tuple[int, ...]
    error: LlmError | None


class Schedule:
    """What a seed stands for: a machine, an engine, requests, and when which fault strikes."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.chip = rng.choice(CHIPS)
        self.order = rng.choice(["random", "late"])
        self.mode: BatchSettings = rng.choice(
            [
                BatchSettings(batch_mode="default"),
                BatchSettings(batch_mode="default", chunk_tokens=32),
                BatchSettings(batch_mode="extend-attention", token_budget=48),
            ]
        )
        self.prefix_cache = cast(PrefixCache, rng.choice(["none", "trie"]))
        kinds: list[FaultKind] = ["refused call", "failed launch", "out of memory", "stall", "long stall"]
        self.fault: FaultKind = rng.choices([*kinds, "lost", "none"], [8, 4, 3, 3, 1, 1, 1])[0]
        self.command = _command(rng, self.fault)
        self.strikes_after = rng.randint(0, 4)  # deltas, to all requests together
        self.num_requests = rng.randint(3, MAX_REQUESTS)
        self.picks = [rng.random() for _ in range(self.num_requests)]

    def __str__(self) -> str:
        mode = type(self.mode).__name__.removesuffix("Options")
        return f"{self.seed}: {self.chip}, {self.order}, {mode}, {self.fault} ({self.command})"

    @property
    def is_stall(self) -> bool:
        return self.fault in ("stall", "long stall")

    @property
    def is_final(self) -> bool:
        """Whether the GPU is of no use any more once the fault has struck."""
        return not self.is_stall and self.fault != "none"

    def options(self) -> EngineSettings:
        stall_timeout_s = PATIENCE_S if self.fault in ("stall", "none") else STALL_TIMEOUT_S
        return EngineSettings(
            device="hip",
            batching=self.mode,
            prefix_cache=self.prefix_cache,
            max_queue=MAX_REQUESTS,
            stall_timeout=stall_timeout_s,
        )


def _command(rng: random.Random, fault: FaultKind) -> str:
    n = rng.randint(1, 40)
    match fault:
        case "refused call":
            return f"fail {rng.choice(REFUSABLE)} {n} {rng.choice(ERRORS)}"
        case "failed launch":
            return f"fail-launch {n} 719"
        case "out of memory":
            return f"fail allocation {n % 8 + 1} 2"
        case "stall" | "long stall":
            return "stall 0"
        case "lost":
            return "lose 0"
        case "none":
            return "forget"


@dataclass(frozen=True)
class Outcome:
    """What came of a fault; `is_closed` is False where a thread was left behind in the GPU's driver."""

    text: str
    is_closed: bool


class Run:
    """One run of a schedule; `run` raises if something that must hold does not."""

    def __init__(self, schedule: Schedule, workload: Workload, control: Control) -> None:
        self._schedule = schedule
        self._workload = workload
        self._control = control
        self._num_deltas = 0
        self._has_struck = asyncio.Event()
        self._num_submitted = 0

    async def run(self) -> Outcome:
        for command in (
            f"chip {self._schedule.chip}",
            f"order {self._schedule.order}",
            f"seed {self._schedule.seed}",
        ):
            self._control.command(command)
        self._control.clear_report()
        engine = self._load()
        engine.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                outcome = await self._serve(engine)
        finally:
            self._control.command("resume 0")
            is_closed = await engine.close(PATIENCE_S)
        assert is_closed or self._schedule.is_final, "the engine did not close"
        report = self._control.report()
        assert not report.findings, "\n".join(map(describe, report.findings))
        return Outcome(outcome, is_closed)

    def _load(self) -> AsyncEngine:
        artifact = Artifact.open(Path(self._workload.artefacts[self._schedule.chip]))
        options = self._schedule.options()
        return load_engine(artifact.config, artifact.vmfb, artifact.parameters, frozenset(), options)

    async def _serve(self, engine: AsyncEngine) -> str:
        picks = [int(pick * len(self._workload.prompts)) for pick in self._schedule.picks]
        self._strike()
        asking = [asyncio.ensure_future(self._ask(engine, prompt)) for prompt in picks]
        if self._schedule.is_stall:
            await self._end_stall(engine, asking)
        answers = await asyncio.gather(*asking)
        for answer in answers:
            self._check(answer)
        is_stuck = self._schedule.is_final and any(UNANSWERED in str(answer.error) for answer in answers)
        while not is_stuck and engine.stats().pages.leased:  # a step that does not end holds its pages
            await asyncio.sleep(0)
        while not (engine.healthy or self._schedule.is_final):
            await asyncio.sleep(0)
        return await self._probe(engine, answers)

    def _strike(self) -> None:
        """Gives the command when its time has come."""
        if self._num_deltas >= self._schedule.strikes_after and not self._has_struck.is_set():
            self._control.command(self._schedule.command)
            self._has_struck.set()

    async def _end_stall(self, engine: AsyncEngine, asking: Sequence[asyncio.Future[Answer]]) -> None:
        """After a long one all have been answered, as the device does not."""
        await self._has_struck.wait()
        if self._schedule.fault == "long stall":
            await asyncio.wait(asking)
        self._control.command("resume 0")

    async def _ask(self, engine: AsyncEngine, prompt: int) -> Answer:
        self._num_submitted += 1
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
        request_id = str(self._num_submitted)
        token_ids = tuple(self._workload.prompts[prompt])
        tokens: list[int] = []
        try:
            async for delta in engine.admit(
                GenerateCall(request_id=request_id, prompt_token_ids=token_ids, params=params)
            ):
                tokens += delta.token_ids
                self._num_deltas += 1
                self._strike()
        except LlmError as error:
            return Answer(prompt, tuple(tokens), error)
        assert delta.finish_reason in (FinishReason.LENGTH, FinishReason.ERROR)
        return Answer(prompt, tuple(tokens), delta.error)

    def _check(self, answer: Answer) -> None:
        """It is right as far as it goes, and ended before its time only by what the fault explains."""
        expected, n = self._workload.expected[answer.prompt], len(answer.token_ids)
        assert_same(Continuation(expected.token_ids[:n], expected.gaps[:n]), answer.token_ids, TOLERANCE)
        if answer.error is None:
            assert n == MAX_TOKENS
        elif isinstance(answer.error, UnavailableError):
            assert self._schedule.is_final or self._schedule.fault == "long stall", answer.error
            assert any(words in str(answer.error) for words in (UNANSWERED, FINAL)), answer.error
        else:
            assert isinstance(answer.error, DeviceLostError), answer.error
            assert self._schedule.is_final, f"{answer.error!r} without a fault"
            assert FINAL in str(answer.error), answer.error

    async def _probe(self, engine: AsyncEngine, answers: Sequence[Answer]) -> str:
        """Later requests: right, or after a failure refused."""
        probes = [await self._ask(engine, 0) for _ in range(NUM_PROBES)]
        for probe in probes:
            self._check(probe)
        if any(isinstance(answer.error, DeviceLostError) for answer in answers):
            assert all(probe.error for probe in probes), "it works again after a failure for good"
            assert not engine.healthy
        if not self._schedule.is_final:
            assert not any(probe.error for probe in probes), "it does not work again"
            assert engine.healthy
        failed = sum(answer.error is not None for answer in (*answers, *probes))
        return f"{failed} of {len(answers) + len(probes)} requests ended by it"


def main(workload: str, *seeds: str) -> None:
    """Ends with status 1 at the first schedule that fails; a hung one is ended by the parent."""
    logging.disable(logging.CRITICAL)
    faulthandler.enable()
    control = Control()
    control.command("threads 1")  # several processes share the CPUs
    read = Workload.read(Path(workload))
    for seed in map(int, seeds):
        schedule = Schedule(seed)
        print(schedule, flush=True)
        outcome = asyncio.run(Run(schedule, read, control).run())
        print(ENDED, outcome.text, flush=True)
        # As the server does. After a long stall another engine in the same process has hung, for a reason not
        # yet known; the parent goes on with the next seed in a new one.
        if not outcome.is_closed or schedule.fault == "long stall":
            os._exit(0)
        for command in ("forget", "resume 0", "revive 0"):
            control.command(command)


if __name__ == "__main__":
    main(*sys.argv[1:])
