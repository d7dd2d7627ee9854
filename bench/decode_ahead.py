"""Tokens per second of a steady decode with and without decoding ahead, in turns, in one process.

    python bench/decode_ahead.py DIR --rows 1,8 --tokens 120 --repeat 6

No server: the engine steps with nothing else to do. Each turn prefills `--rows` prompts of 128 tokens and
then measures the decodes until all are done, greedy and with temperature, top-k and top-p. Printed are
medians, the ratio of each pair of turns, and arrays uploaded for a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.serving.loading import EngineOptions, make_engine

PROMPT_TOKENS = 128
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 1},
}
SETTINGS: tuple[Literal["on", "off"], ...] = ("off", "on")


@dataclass(frozen=True, slots=True)
class Turn:
    """The decodes of one batch."""

    tokens_per_s: float
    uploads_per_step: float


def run(engine: Engine, rows: int, tokens: int, params: Mapping[str, Any]) -> Turn:
    for row in range(rows):
        prompt = tuple(range(5 + row, 5 + row + PROMPT_TOKENS))
        asked = SamplingParams(max_tokens=tokens, ignore_eos=True, **params)
        engine.add(GenerateCall(request_id=str(row), prompt_token_ids=prompt, params=asked))
    num_generated = 0
    while num_generated < 4 * rows:
        num_generated += _step(engine)
    before, began_s, measured = engine.stats(), time.perf_counter(), 0
    while engine.has_work:
        measured += _step(engine)
    duration_s, after = time.perf_counter() - began_s, engine.stats()
    steps = after.steps - before.steps
    return Turn(measured / duration_s, (after.uploads - before.uploads) / steps)


def _step(engine: Engine) -> int:
    return sum(len(delta.token_ids) for delta in engine.step())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, metavar="DIR", help="a model with decode loops")
    parser.add_argument("--rows", default="1,8", metavar="N,N,...", help="requests that decode together")
    parser.add_argument("--tokens", type=int, default=120, help="of each request")
    parser.add_argument("--repeat", type=int, default=6, help="pairs of turns")
    parser.add_argument("--device", default="cpu", help="as for `serve`")
    arguments = parser.parse_args()
    device = open_device(arguments.device)
    try:
        engines = {setting: _engine(device, arguments.artifact, setting) for setting in SETTINGS}
        print("| rows | sampling | tok/s off | on | on / off | uploads a step off | on |")
        print("|---|---|---|---|---|---|---|")
        for rows in map(int, arguments.rows.split(",")):
            for kind, params in KINDS.items():
                turns = _pairs(engines, rows, arguments.tokens, params, arguments.repeat)
                print(f"| {rows} | {kind} | {_summary(turns)} |", flush=True)
    finally:
        device.close()


def _engine(device: Any, directory: Path, setting: Literal["on", "off"]) -> Engine:
    artifact = Artifact.open(directory)
    options = EngineOptions(decode_ahead=setting, prefix_cache="none")
    return make_engine(device, artifact.config, artifact.vmfb, artifact.parameters, frozenset(), options)


def _pairs(
    engines: Mapping[str, Engine], rows: int, tokens: int, params: Mapping[str, Any], repeat: int
) -> dict[str, list[Turn]]:
    """Measure both settings in pairs, alternating which one goes first."""
    turns: dict[str, list[Turn]] = {setting: [] for setting in SETTINGS}
    for number in range(repeat):
        for setting in SETTINGS if number % 2 else reversed(SETTINGS):
            turns[setting].append(run(engines[setting], rows, tokens, params))
    return turns


def _summary(turns: Mapping[str, list[Turn]]) -> str:
    pairs = zip(turns["off"], turns["on"], strict=True)
    ratios = sorted(on.tokens_per_s / off.tokens_per_s for off, on in pairs)
    speeds = [statistics.median(turn.tokens_per_s for turn in turns[setting]) for setting in SETTINGS]
    uploads = [statistics.median(turn.uploads_per_step for turn in turns[setting]) for setting in SETTINGS]
    ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return " | ".join([*(f"{s:.0f}" for s in speeds), ratio, *(f"{u:.2f}" for u in uploads)])


if __name__ == "__main__":
    main()
