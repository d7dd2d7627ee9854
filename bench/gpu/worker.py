"""One part of the measurement, in a process of its own: a device that fails takes no other part along.

    python -m bench.gpu.worker PARTS PACK MODEL DIR --results FILE

DIR is the completed model. Each result is appended to FILE, as one line of JSON, when it is there.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

from bench.gpu import adjusted as adjusted_part
from bench.gpu import drafting as drafting_part
from bench.gpu import engine as engine_part
from bench.gpu import entries as entries_part
from bench.gpu import loops as loops_part
from bench.gpu import mixed as mixed_part
from bench.gpu import serving as serving_part
from bench.gpu import tokens as tokens_part
from bench.gpu.environment import MODELS as MODELS_FOLDER
from bench.gpu.models import MODELS, Model
from bench.gpu.one_program import OneProgram
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching import BATCH_MODES
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.invocation.page_table import make_runner
from shortfin_apps.llm.components.runtime.check import check_program
from shortfin_apps.llm.components.runtime.device import GPU_NAMES
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.serving.engine_settings import EngineSettings, Speculative
from shortfin_apps.llm.serving.loading import ModelFacts, make_engine
from shortfin_apps.llm.serving.speculative_loading import DraftFiles

Emit = Callable[[dict[str, Any]], None]
ROWS_ON_HOST = ", rows on the host"  # suffix for measurements without the entries that adjust rows
DEPTHS = (0, 1, 2)  # steps queued before the tokens of the running one are known
STEADY_DEPTHS = (0, 1)  # of these, in steady decodes


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    model = MODELS[args.model]

    def emit(record: dict[str, Any]) -> None:
        line = json.dumps(record)
        with args.results.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

    try:
        if args.parts == ["http"]:
            serving_part.measure(model, args.directory, args.device, emit)
        else:
            _measure_in_process(model, args, emit)
    except LlmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", type=lambda text: text.split(","))
    parser.add_argument("pack", type=Path)
    parser.add_argument("model", choices=tuple(MODELS))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sample-seconds", type=float, default=0.5)
    parser.add_argument("--results", type=Path, required=True)
    return parser


def _measure_in_process(model: Model, args: argparse.Namespace, emit: Emit) -> None:
    artifact = Artifact.open(args.directory)
    with closing(open_device(args.device, "iree")) as opened:
        begin = time.perf_counter()
        device = OneProgram(opened, artifact, args.device)
        load_s = time.perf_counter() - begin
        emit({"part": "load", "model": model.name, "device": opened.name, "load_s": load_s})
        if "tokens" in args.parts:
            packed = args.pack / MODELS_FOLDER / model.name
            expected = json.loads((packed / tokens_part.EXPECTED).read_text(encoding="utf-8"))
            _compare_tokens(model, device, artifact, expected, emit)
            _compare_adjusted(model, device, artifact, emit)
        cases = list(entries_part.cases(model, has_extend="extend" in device.program.entries))
        # One number for all, as freed memory is reused only for buffers of exactly its size.
        pages = max(entries_part.pages(cases), engine_part.pages(model), mixed_part.pages(model))
        if "entries" in args.parts:
            _measure_entries(model, device, artifact, cases, pages, args.sample_seconds, emit)
        if "engine" in args.parts:
            for depth in _depths(device, STEADY_DEPTHS):
                _measure_engine(model, device, artifact, depth, pages, emit)
            for mode, depth in product(BATCH_MODES, _depths(device)):
                _measure_mixed(model, device, artifact, mode, depth, pages, emit)
        if "drafts" in args.parts and model.spec.draft is not None:
            _measure_drafts(model, device, artifact, emit)
        if "engine" in args.parts and _adjusts(device):
            on_host = device.without(adjusted_part.ENTRIES)
            _measure_engine(model, on_host, artifact, 0, pages, emit, suffix=ROWS_ON_HOST)


def _compare_tokens(
    model: Model, device: OneProgram, artifact: Artifact, expected: list[list[int]], emit: Emit
) -> None:
    pages = tokens_part.scarce_pages(model)
    drafts: tuple[Speculative, ...] = ("mtp",) if model.spec.draft else ()
    kinds: tuple[Speculative, ...] = ("off", "ngram", *drafts)
    for mode, depth, kind in product(BATCH_MODES, _depths(device), kinds):
        settings, most = BatchSettings(batch_mode=mode), tokens_part.PROMPTS
        engine = _engine(model, device, artifact, depth, settings, pages, most, speculative=kind)
        with drafting_part.always():
            tokens = engine_part.generate(engine, tokens_part.make_prompts(model), tokens_part.MAX_TOKENS)
        stats = engine.stats()
        counts = stats.speculation
        emit(
            {
                "part": "tokens",
                "model": model.name,
                "mode": mode,
                "depth": depth,
                "preemptions": stats.preemptions,
                "speculative": kind,
                "proposed": None if counts is None else counts.proposed,
                "accepted": None if counts is None else counts.accepted,
                **tokens_part.compare(tokens, expected),
            }
        )


def _compare_adjusted(model: Model, device: OneProgram, artifact: Artifact, emit: Emit) -> None:
    """Compare rows adjusted on the device with the host's, which adjusts them if the entries are missing."""
    if not _adjusts(device):
        return
    pages, rows = tokens_part.scarce_pages(model), tokens_part.PROMPTS
    without = device.without(adjusted_part.ENTRIES)
    for mode, depth in product(BATCH_MODES, _depths(device)):
        settings = BatchSettings(batch_mode=mode)
        on_host = adjusted_part.tokens_of(
            _engine(model, without, artifact, depth, settings, pages, rows), model
        )
        engine = _engine(model, device, artifact, depth, settings, pages, rows)
        on_device = adjusted_part.tokens_of(engine, model)
        agreement = tokens_part.compare(on_device, on_host)
        found = {"mode": mode, "depth": depth, "invocations": adjusted_part.num_adjusting(engine)}
        emit({"part": "adjusted", "model": model.name, **found, **agreement})


def _measure_entries(
    model: Model,
    device: OneProgram,
    artifact: Artifact,
    cases: Sequence[entries_part.Case],
    pages: int,
    sample_s: float,
    emit: Emit,
) -> None:
    program = entries_part.RecordedProgram(device.program)
    check_program(program, artifact.config)
    runner = make_runner(device, program, artifact.config, pages)
    for case in cases:
        figures = entries_part.measure(case, runner, program, sample_s)
        emit({"part": "entries", "model": model.name, **figures})
    for rows in loops_part.loop_sizes(program.entries):
        figures = loops_part.measure(model, rows, runner, device, program, sample_s)
        emit({"part": "entries", "model": model.name, **figures})
    for case in cases if runner.buckets.computes_logprobs else ():
        if case.batch.family is EntryFamily.DECODE:
            for measure in (entries_part.measure_logprobs, entries_part.measure_draws):
                figures = measure(case, runner, program, sample_s)
                emit({"part": "entries", "model": model.name, **figures})


def _measure_engine(
    model: Model,
    device: OneProgram,
    artifact: Artifact,
    depth: int,
    pages: int,
    emit: Emit,
    *,
    suffix: str = "",
) -> None:
    """Measure steady decodes; with a `suffix` for the name, only the sampling that adjusts rows."""
    gc.collect()  # frees the memory of earlier measurements
    most = max(engine_part.sizes(model))
    engine = _engine(model, device, artifact, depth, engine_part.WIDE_PREFILLS, pages, most)
    engine_part.compute_prompts_first(engine)
    samplings = [engine_part.ADJUSTED] if suffix else engine_part.SAMPLINGS
    for requests, sampling in product(engine_part.sizes(model), samplings):
        steps = engine_part.steady_steps(engine, model, requests, sampling)
        emit(
            {
                "part": "engine",
                "model": model.name,
                "depth": depth,
                "sampling": sampling + suffix,
                "requests": requests,
                "context": model.context,
                **steps.record(),
            }
        )


def _measure_drafts(model: Model, device: OneProgram, artifact: Artifact, emit: Emit) -> None:
    """Measure steady decodes with and without drafts, once the engine knows how often they are right."""
    pages, most = drafting_part.pages(model), max(engine_part.sizes(model))
    for kind in drafting_part.ROUNDS:
        gc.collect()  # frees the memory of earlier measurements
        speculative: Speculative = "off" if kind == "off" else "mtp"
        settings = engine_part.WIDE_PREFILLS
        with drafting_part.rounds(kind):
            engine = _engine(model, device, artifact, 1, settings, pages, most, speculative=speculative)
            engine_part.compute_prompts_first(engine)
            for requests in engine_part.sizes(model):
                drafting_part.measure(engine, model, requests)
                found = drafting_part.measure(engine, model, requests)
                emit({"part": "drafts", "model": model.name, "rounds": kind, **found})


def _measure_mixed(
    model: Model,
    device: OneProgram,
    artifact: Artifact,
    mode: BatchModeName,
    depth: int,
    pages: int,
    emit: Emit,
) -> None:
    """Measure mixed traffic with a server's token budgets; at depths above 1, only of plain requests."""
    gc.collect()  # frees the memory of earlier measurements
    settings, most = BatchSettings(batch_mode=mode), mixed_part.clients(model)
    recorded, program = device.recorded()
    engine = _engine(model, recorded, artifact, depth, settings, pages, most)
    engine.tune(on_gpu=device.kind in GPU_NAMES)
    for sampling in mixed_part.SAMPLINGS if depth in STEADY_DEPTHS else mixed_part.PLAIN:
        traffic = mixed_part.measure(engine, model, sampling)
        if sampling in mixed_part.PLAIN:
            traffic.back_to_back_s = mixed_part.back_to_back_s(engine, model, sampling, program, device)
        measured = {"mode": mode, "depth": depth, "sampling": sampling, "requests": most}
        emit({"part": "mixed", "model": model.name, **measured, **traffic.record()})


def _adjusts(device: OneProgram) -> bool:
    """Whether the program adjusts rows on the device."""
    return any(name.startswith(adjusted_part.ENTRIES) for name in device.program.entries)


def _depths(device: OneProgram, depths: Sequence[int] = DEPTHS) -> Sequence[int]:
    """Return the depths, or only the first, 0, if the program has no decode loops."""
    return depths if loops_part.loop_sizes(device.program.entries) else depths[:1]


def _engine(
    model: Model,
    device: OneProgram,
    artifact: Artifact,
    depth: int,
    mode: BatchSettings,
    pages: int,
    max_running: int,
    *,
    speculative: Speculative = "off",
) -> Engine:
    """Create an engine; with `ngram`, the model is also its own draft at no cost, unless it has states."""
    draft = DraftFiles(
        config=artifact.config, vmfb=artifact.vmfb, parameters=artifact.parameters, round_cost=0
    )
    can_draft = "state" not in artifact.config.pools
    facts = ModelFacts(draft_model=draft if speculative == "ngram" and can_draft else None)
    options = EngineSettings(
        device=device.kind,
        speculative=speculative,
        batching=mode,
        prefix_cache="none",
        pipeline_depth=depth,
        pages=pages,
        max_running=max_running,
    )
    return make_engine(
        device, artifact.config, artifact.vmfb, artifact.parameters, frozenset(), options, facts
    )


if __name__ == "__main__":
    sys.exit(main())
