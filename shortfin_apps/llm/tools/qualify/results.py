"""Checks of what the device computes: entries, queued invocations, uploads, weights and tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.invocation.page_table import make_runner
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.runtime.open import open_device as open_any
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import make_engine
from shortfin_apps.llm.tools.qualify.bench import Bench, LoadedModel
from shortfin_apps.llm.tools.qualify.diagnosis import damaged_files, examine
from shortfin_apps.llm.tools.qualify.facts import facts, obstacle
from shortfin_apps.llm.tools.qualify.outcome import Failed, Fault, Passed, Skipped


def describe_machine(bench: Bench) -> Passed:
    found = facts(bench.plan.device)
    if (reason := obstacle(bench.plan.device)) is not None:
        raise Failed(None, reason, found)
    name = found["chip"]["name"] if found["chip"] else bench.plan.device
    return Passed(f"{name}, {found['cpu']['model']}, Linux {found['system']['kernel']}", found)


def open_device(bench: Bench) -> Passed:
    name = bench.device.name
    text = f"{name}, emulated" if bench.is_emulated else name
    return Passed(f"opened {text}", {"name": name, "is_emulated": bench.is_emulated})


def build(bench: Bench) -> Passed:
    """Build what other checks need, so that their time does not contain it."""
    artifact = bench.artifact
    manifest = artifact.manifest
    if manifest is None:
        raise Failed(None, "the files have no manifest; `shortfin-llm build` writes one")
    count, kind = len(manifest.program.entries), manifest.options.stored_weights
    notes = [f"{count} entries of {manifest.spec.name} in {kind}"]
    try:
        others = [bench.exact, bench.exact_on_cpu, bench.invariant]
        notes.append(f"{len(others)} artefacts of random:tiny for other checks")
    except Skipped as skipped:
        notes.append(f"without random:tiny, which {skipped}")
    figures = {
        "identity": manifest.identity,
        "built_by": manifest.product_version,
        "versions_at_build": manifest.versions,
        "kernels": list(manifest.program.kernels),
    }
    return Passed(", ".join(notes), figures)


def check_files(bench: Bench) -> Passed:
    if damaged := damaged_files(bench):
        name, problem = next(iter(damaged.items()))
        raise Failed(Fault.DAMAGED_FILE, f"{name} {problem}", {"files": damaged})
    return Passed("all files are as built")


def self_test(bench: Bench) -> Passed:
    passed, bits = examine(bench, bench.model)
    bench.known_bits = dict(bits)
    return passed


def self_test_in_f32(bench: Bench) -> Passed:
    """Compare `random:tiny` in f32, whose tolerance is small enough to see a wrong element."""
    return examine(bench, bench.exact_model)[0]


NUM_QUEUED = 8  # decodes after a prefill
QUEUED_TOKENS = 40  # of the prompt


def queued(bench: Bench) -> Passed:
    """Queue dependent invocations without waiting, and compare with waiting after each."""
    model = bench.model
    waited = list(_chain(model, waits=True))
    for attempt in range(3):
        if (found := list(_chain(model, waits=False))) != waited:
            what = "logits" if found[0] != waited[0] else "keys and values"
            raise Failed(
                Fault.MISSING_WAIT,
                f"a prefill and {NUM_QUEUED} decodes, queued one after another, give other {what} than with "
                f"a wait after each (attempt {attempt + 1} of 3)",
            )
    return Passed(f"a prefill and {NUM_QUEUED} decodes give the same bits queued and one by one")


def _chain(model: LoadedModel, *, waits: bool) -> Iterator[bytes]:
    """Run a prefill and decodes on new pages; yield the bits of the last logits, then of each slab."""
    stride = model.config.stride
    num_pages = 1 + -(-(QUEUED_TOKENS + NUM_QUEUED) // stride)
    window_pages = 0 if model.config.window_tokens is None else num_pages
    runner = make_runner(model.device, model.program, model.config, num_pages, window_pages)
    random = Random(0)
    tokens = [random.randrange(1, 200) for _ in range(QUEUED_TOKENS + NUM_QUEUED)]
    call = GenerateCall(
        request_id="queued", prompt_token_ids=tuple(tokens), params=SamplingParams(max_tokens=1)
    )
    pages = list(range(1, num_pages))

    def batch(family: EntryFamily, start: int, stop: int) -> Batch:
        task = LlmTaskInput(Request(call), tokens[start:stop], start, stop, pages, pages)
        return Batch(family, (task,))

    batches = [batch(EntryFamily.PREFILL, 0, QUEUED_TOKENS)]
    batches += [
        batch(EntryFamily.DECODE, QUEUED_TOKENS + number, QUEUED_TOKENS + number + 1)
        for number in range(NUM_QUEUED)
    ]
    launches = []
    for each in batches:
        launches.append(runner.launch(each))
        if waits:
            runner.wait(launches[-1])
    for launch in [] if waits else launches[:-1]:
        runner.wait(launch)
    row = runner.result(launches[-1]).row(0, with_logits=runner.returns_logits)
    yield (row.values if row.logits is None else row.logits).tobytes()
    for slab in runner.download_pages():
        yield slab[1:].tobytes()  # page 0 is scratch


UPLOADS = 40


def uploads(bench: Bench) -> Passed:
    """Check that the device reads what the host has just written, in memory that is used again and again."""
    device, machine = bench.device, bench.machine
    from shortfin_apps.llm.tools.bench.roofline.measure import STREAM_COLUMNS  # imports the compiler

    random = np.random.default_rng(0)
    for number in range(UPLOADS):
        rows = int(random.choice((1, 4, 64)))
        written = random.integers(-1000, 1000, (rows, STREAM_COLUMNS), np.int32)
        found = device.download(machine.row_sums(device.upload(written)))
        if wrong := int((found != written.sum(axis=1, dtype=np.int32)).sum()):
            raise Failed(
                Fault.STALE_MEMORY,
                f"upload {number + 1} of {UPLOADS}: the device read other values than the host wrote, in "
                f"{wrong} of {rows} rows of {STREAM_COLUMNS * 4 >> 10} KiB",
            )
    return Passed(f"{UPLOADS} uploads of up to {64 * STREAM_COLUMNS * 4 >> 20} MiB were read as written")


RELOADS = 2


def weights(bench: Bench) -> Passed:
    """Check that the parameters in the device's memory stay as loaded, and that new loads are right at once.

    A GPU that shares the CPU's memory could read what a cache still held when a program first runs.
    """
    if bench.known_bits is None:
        bench.known_bits = dict(examine(bench, bench.model)[1])
    for _ in range(RELOADS):
        examine(bench, bench.reload(), bench.known_bits)
    examine(bench, bench.model, bench.known_bits)
    return Passed(f"the first load still gives the bits of its first run, as {RELOADS} new loads do at once")


# The first four fill a page each, and one finds none when all of them begin another.
LENGTHS = (*(4 * (15,)), *range(1, 49, 3))
MAX_TOKENS = 8
PAGES_OF_TOKENS = 8  # of which one is scratch
NEAR_TIE = 1e-3  # of two log-probabilities, between which rounding may choose
MODES: tuple[BatchModeName, ...] = ("default", "extend-attention")


@dataclass(frozen=True, slots=True)
class Continuation:
    """Greedy tokens of a prompt, and for each the gap between the best two log-probabilities."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]

    def difference(self, other: Continuation) -> str | None:
        """Describe how `other` differs; None if only where this one is near a tie, and after that."""
        for index, (want, have, gap) in enumerate(
            zip(self.token_ids, other.token_ids, self.gaps, strict=False)
        ):
            if want != have:
                return None if gap < NEAR_TIE else f"token {index + 1} is {have}, and {want} on the CPU"
        if len(self.token_ids) != len(other.token_ids):
            return f"{len(other.token_ids)} tokens, and {len(self.token_ids)} on the CPU"
        return None


def tokens(bench: Bench) -> Passed:
    """Compare greedy tokens of `random:tiny` in f32 with the CPU's, in both modes and with preemption."""
    if not bench.is_on_gpu:
        raise Skipped("this is the CPU")
    random = Random(1)
    prompts = [[random.randrange(32, 127) for _ in range(length)] for length in LENGTHS]
    cpu = bench.exact_on_cpu
    expected, _ = _generate(cpu, open_any("cpu"), "cpu", prompts, "default", len(prompts) * PAGES_OF_TOKENS)
    preemptions = 0
    for mode in MODES:
        found, count = _generate(bench.exact, bench.device, bench.kind, prompts, mode, PAGES_OF_TOKENS)
        preemptions += count
        for number, (want, have) in enumerate(zip(expected, found, strict=True), 1):
            if (difference := want.difference(have)) is not None:
                text = f"prompt {number} of {len(prompts)}, mode {mode}: {difference}"
                raise Failed(Fault.WRONG_ANSWER, text, {"preemptions": preemptions})
    return Passed(
        f"{len(prompts)} prompts have the CPU's tokens in {len(MODES)} modes, with {preemptions} preemptions",
        {"preemptions": preemptions},
    )


def _generate(
    artifact: Artifact,
    device: Device,
    kind: str,
    prompts: Sequence[Sequence[int]],
    mode: BatchModeName,
    pages: int,
) -> tuple[list[Continuation], int]:
    """Return the continuation of each prompt, and the number of preemptions."""
    settings = EngineSettings(
        device=kind, batching=BatchSettings(batch_mode=mode), pages=pages, prefix_cache="none"
    )
    files: tuple[Path, Sequence[Path]] = artifact.vmfb, artifact.parameters
    engine = make_engine(device, artifact.config, *files, frozenset(), settings)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, logprobs=2)
    token_ids: list[list[int]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        engine.add(GenerateCall(request_id=str(number), prompt_token_ids=tuple(prompt), params=params))
    while engine.has_work:
        for delta in engine.step():
            if delta.error is not None:
                raise delta.error
            token_ids[int(delta.request_id)] += delta.token_ids
            gaps[int(delta.request_id)] += [each.top[0][1] - each.top[1][1] for each in delta.logprobs]
    found = [Continuation(tuple(ids), tuple(gap)) for ids, gap in zip(token_ids, gaps, strict=True)]
    return found, engine.stats().preemptions
