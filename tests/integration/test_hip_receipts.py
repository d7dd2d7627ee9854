"""Which bits are the same on an emulated AMD GPU.

Of receipts, replayed alone in the other batch mode, and of one token by all entries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.page_table import make_runner
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.model.kv_layout import KVType
from shortfin_apps.llm.model.spec import BuildOptions, WeightType
from shortfin_apps.llm.serving.receipts.receipt import Receipt
from shortfin_apps.llm.tools.replay.compare import Outcome
from shortfin_apps.llm.tools.replay.in_process import EXTEND, SCHEDULES, opened, replay
from tests.conftest import BuildTiny
from tests.hip import CHIPS, EmulatedGpus
from tests.integration.served_tiny import serving
from tests.integration.test_receipts import bodies, receipt_in

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600)]

CHIP = CHIPS[0]
OPTIONS = BuildOptions(
    device=f"hip:{CHIP}",
    prefill_batch_sizes=(1,),
    decode_batch_sizes=(1, 4),
    extend_sizes=(64,),
    context_length=256,
)
SAME_UP_TO = 32  # tokens, whatever computes the last one
PAGE_TOKENS = 16
MANY_PAGES = 400
TABLE_PAGES = 9  # of a block table of its own
COUNTS = pytest.mark.parametrize(
    ("count", "few_pages"), [(12, 9), pytest.param(50, 12, marks=pytest.mark.by_hand)]
)
MODES = pytest.mark.parametrize(("mode", "schedule"), [("default", EXTEND), (EXTEND, "alone")])


@pytest.fixture
def artifact(build_tiny: BuildTiny, emulated_gpus: EmulatedGpus) -> Iterator[Artifact]:
    with emulated_gpus.watch(CHIP):
        yield build_tiny(replace(OPTIONS, batch_invariant=False))


@pytest.fixture
def batch_invariant(build_tiny: BuildTiny, emulated_gpus: EmulatedGpus) -> Iterator[Artifact]:
    with emulated_gpus.watch(CHIP):
        yield build_tiny(replace(OPTIONS, batch_invariant=True))


def prefilled_alike() -> list[dict[str, Any]]:
    """No prompt ends with the first token of a page: alone behind cached ones, it would be as in a decode."""
    return [body for body in bodies() if len(body["input_ids"]) % PAGE_TOKENS != 1]


async def made(
    artifact: Artifact, mode: str, asked: list[dict[str, Any]], pages: int
) -> tuple[list[Receipt], int]:
    """The receipts of one server, and how many preemptions it had."""
    settings = {"device": "hip", "batch_mode": mode, "pages": pages, "self_test": "off"}
    async with serving(artifact, **settings) as (client, service):
        posts = (client.post("/generate", json=body) for body in asked)
        answers = [response.json() for response in await asyncio.gather(*posts)]
        return list(map(receipt_in, answers)), service.model.generator.engine.stats().preemptions


def replayed(artifact: Artifact, receipts: list[Receipt], schedule: str) -> Outcome:
    with opened(artifact.vmfb.parent, receipts, "hip") as subject:
        return replay(subject, SCHEDULES[schedule])


@COUNTS
@MODES
def test_receipts_are_the_same_alone_in_the_other_mode(
    artifact: Artifact, mode: str, schedule: str, count: int, few_pages: int
) -> None:
    receipts, preemptions = asyncio.run(made(artifact, mode, prefilled_alike()[:count], MANY_PAGES))
    outcome = replayed(artifact, receipts, schedule)
    assert (preemptions, outcome.differences, outcome.num_same) == (0, {}, count)


@COUNTS
@MODES
def test_a_preemption_changes_no_answer_of_a_batch_invariant_artefact(
    batch_invariant: Artifact, mode: str, schedule: str, count: int, few_pages: int
) -> None:
    receipts, preemptions = asyncio.run(made(batch_invariant, mode, bodies()[:count], few_pages))
    outcome = replayed(batch_invariant, receipts, schedule)
    print(f"{preemptions} preemptions, {outcome.num_same} of {count} the same: {outcome.differences}")
    assert preemptions > 0
    assert (outcome.differences, outcome.num_same) == ({}, count)


class Ways:
    """The logits of a prompt's last token, by all entries that compute it."""

    def __init__(self, runner: BatchRunner, length: int) -> None:
        random = Random(1)
        self._runner = runner
        self._tokens = [random.randrange(32, 127) for _ in range(length)]
        self._length = length

    def _last(self, family: EntryFamily, start: int, rows: int = 1) -> bytes:
        """Of the tokens from `start` on, in so many rows, each behind a prefill of those before."""
        for row in range(rows) if start else ():
            self._runner.run(Batch(EntryFamily.PREFILL, (self._task(row, 0, start),)))
        tasks = [self._task(row, start, self._length) for row in range(rows)]
        found = self._runner.run(Batch(family, tuple(tasks))).row(rows - 1, with_logits=True).logits
        assert found is not None
        return found.tobytes()

    def _task(self, row: int, start: int, stop: int) -> LlmTaskInput:
        call = GenerateCall(
            request_id="", prompt_token_ids=tuple(self._tokens), params=SamplingParams(max_tokens=1)
        )
        pages = [1 + row * TABLE_PAGES + index for index in range(TABLE_PAGES)]
        return LlmTaskInput(Request(call, 0.0), self._tokens[start:stop], start, stop, pages, None)

    def in_chunks(self) -> set[bytes]:
        """Among other tokens: of the whole prompt, and of its last page."""
        last_page = (self._length - 2) // self._runner.stride * self._runner.stride
        return {
            self._last(EntryFamily.PREFILL, 0),
            self._last(EntryFamily.PREFILL, last_page),
            self._last(EntryFamily.EXTEND, 0),
            self._last(EntryFamily.EXTEND, last_page),
        }

    def alone(self) -> set[bytes]:
        """As the only one of its row, as a decode is: beside nothing, and beside others."""
        return {
            self._last(family, self._length - 1, rows)
            for family, rows in (
                *((EntryFamily.DECODE, rows) for rows in (1, 4)),
                *((EntryFamily.EXTEND, rows) for rows in (1, 2)),
            )
        }


def ways_of(
    artifact: Artifact, emulated_gpus: EmulatedGpus, length: int, chip: str = CHIP
) -> tuple[set[bytes], set[bytes]]:
    """The logits of a token in chunks, and alone."""
    device = emulated_gpus.open(chip)
    try:
        program = device.load_program(artifact.vmfb, artifact.parameters, artifact.config.module_name)
        ways = Ways(make_runner(device, program, artifact.config, 1 + 4 * TABLE_PAGES), length)
        return ways.in_chunks(), ways.alone()
    finally:
        device.close()


@pytest.mark.parametrize("length", [2, 16, 18, SAME_UP_TO, 49, 66, 130])
def test_a_token_has_the_same_bits_in_all_chunks_and_in_all_decodes(
    artifact: Artifact, emulated_gpus: EmulatedGpus, length: int
) -> None:
    """But not the same in both, where it sees more than SAME_UP_TO."""
    [in_chunk], [alone] = ways_of(artifact, emulated_gpus, length)
    assert (in_chunk == alone) == (length <= SAME_UP_TO)


@pytest.mark.parametrize("length", [2, 49, 66, 130])
def test_a_token_of_a_batch_invariant_artefact_has_the_same_bits_anywhere(
    batch_invariant: Artifact, emulated_gpus: EmulatedGpus, length: int
) -> None:
    in_chunks, alone = ways_of(batch_invariant, emulated_gpus, length)
    assert len(in_chunks | alone) == 1


# (weights, cache) on all chips; then weights that one of them has.
KINDS = (("bf16", "bf16"), ("f32", "f32"), ("f16", "f16"), ("q8_0", "q8_0"), ("q4", "bf16"))
INVARIANT = [
    *((chip, *kind) for chip in ("gfx942", "gfx1100", "gfx1151") for kind in KINDS),
    ("gfx942", "fp8", "bf16"),
]


@pytest.mark.parametrize(("chip", "weights", "kv"), INVARIANT, ids=["-".join(each) for each in INVARIANT])
def test_a_token_has_the_same_bits_anywhere_on_each_chip_with_each_weight(
    build_tiny: BuildTiny, emulated_gpus: EmulatedGpus, chip: str, weights: WeightType, kv: KVType
) -> None:
    """By default. Of a prefill, an extend and a decode, in several shares of the context."""
    artifact = build_tiny(replace(OPTIONS, device=f"hip:{chip}", weights=weights, kv=kv))
    with emulated_gpus.watch(chip):
        for length in (18, 49, 140):
            in_chunks, alone = ways_of(artifact, emulated_gpus, length, chip)
            assert len(in_chunks | alone) == 1, length
