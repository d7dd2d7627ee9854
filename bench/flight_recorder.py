"""The flight recorder's own time in each step of an engine.

    python -m bench.flight_recorder                           # its calls alone, for 1, 8 and 64 rows
    python -m bench.flight_recorder DIR --rows 8 --tokens 64  # beside an engine's steps

Of calls alone, the 5th percentile is printed, as other programs lengthen most of them on a busy machine.
Beside an engine, every call is metered by its CPU time while requests are prefilled and decode.
`shortfin-llm bench --url with=URL --url without=URL` measures servers with and without it, in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.batch_runner import BatchResult
from shortfin_apps.llm.components.kvcache.base import Lease
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.contract.abi import EntryFamily, SamplingField
from shortfin_apps.llm.serving.loading import EngineOptions, make_engine

CALLS = ("run", "fetched", "loop", "step", "draw", "clear", "ended", "turn")
PROMPT_TOKENS = 128
CANDIDATES = 64


class Meter:
    """Measures this thread's CPU seconds in the functions that it wraps."""

    def __init__(self) -> None:
        self.taken_s = 0.0

    def metered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.taken_s += time.thread_time() - began_s

        return timed


def calls_alone(rows: int) -> None:
    recorder, batch = FlightRecorder(), _batch(rows)
    requests = [task.request for task in batch.tasks]
    values = np.random.default_rng(0).standard_normal((rows, 1, CANDIDATES)).astype(np.float32)
    result = BatchResult(batch, values, np.arange(values.size).reshape(values.shape), None)
    loop = recorder.loop(batch.tasks, [(0,) * len(SamplingField)] * rows)

    def turn() -> None:
        counts = {"num_running": rows, "num_waiting": 0, "num_preemptions": 0}
        recorder.turn(recorder.clock(), **counts, ended=())

    def decode() -> None:
        record = recorder.run("decode", 32, batch)
        recorder.fetched(record, result.note(record))
        turn()

    def step() -> None:
        record = recorder.step("decode_loop", loop, 1, requests)
        record.token_ids = [1] * rows
        recorder.ended(record)
        turn()

    print(
        f"{rows} rows: {_typical_us(decode):.1f} us for a decode, {_typical_us(step):.1f} for a loop's step"
    )


def _batch(rows: int) -> Batch:
    call = GenerateCall(
        request_id="", prompt_token_ids=(1,) * PROMPT_TOKENS, params=SamplingParams(max_tokens=9)
    )
    requests = [Request(call) for _ in range(rows)]
    for request in requests:
        request.lease = Lease(list(range(1, 30)))
    start = PROMPT_TOKENS - 1
    tasks = [LlmTaskInput(r, (1,), start, start + 1, r.page_ids, None) for r in requests]
    return Batch(EntryFamily.DECODE, tuple(tasks))


def _typical_us(function: Callable[[], None], count: int = 4_000) -> float:
    taken_s = []
    for _ in range(count):
        began_s = time.perf_counter()
        function()
        taken_s.append(time.perf_counter() - began_s)
    return 1e6 * sorted(taken_s)[count // 20]


def own_time(directory: Path, rows: int, tokens: int) -> None:
    artifact, recorder, meter = Artifact.open(directory), FlightRecorder(), Meter()
    for name in CALLS:
        setattr(recorder, name, meter.metered(getattr(recorder, name)))
    BatchResult.note = meter.metered(BatchResult.note)  # type: ignore[method-assign]
    device = open_device()
    engine = make_engine(
        device,
        artifact.config,
        artifact.vmfb,
        artifact.parameters,
        frozenset(),
        EngineOptions(),
        recorder=recorder,
    )
    for row in range(rows):
        prompt = tuple(range(5 + row, 5 + row + PROMPT_TOKENS))
        asked = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        engine.add(GenerateCall(request_id=str(row), prompt_token_ids=prompt, params=asked))
    began_s, steps = time.perf_counter(), 0
    while engine.has_work:
        engine.step()
        steps += 1
    step_s = (time.perf_counter() - began_s) / steps
    own_s = meter.taken_s / steps
    print(
        f"{steps} steps of {rows} rows: {1e6 * own_s:.1f} us of the recorder's in a step of "
        f"{1e3 * step_s:.1f} ms, {100 * own_s / step_s:.3f} %; {recorder.num_bytes / 1024:.0f} KiB"
    )
    device.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, nargs="?", metavar="DIR")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    if arguments.directory is None:
        for rows in (1, 8, 64):
            calls_alone(rows)
    else:
        own_time(arguments.directory, arguments.rows, arguments.tokens)


if __name__ == "__main__":
    main()
