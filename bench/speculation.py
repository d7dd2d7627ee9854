"""Tokens per second with and without speculation, in turns, in one process; the tokens must be the same.

    python bench/speculation.py DIR --tasks edit,summary,story,W1,W3 --tokens 192 --repeat 5
    python bench/speculation.py DIR --speculative-model DIR

Speculation is prompt lookup, or a draft model. No server: two engines take a step in turns, with nothing else
to do, so that a machine whose speed changes slows down both. `edit` asks the model to repeat code with a
change, `summary` to sum up a text, `story` for a new one (sampled); `W1` and `W3` have prompts of prose as
`shortfin-llm bench` has them, W1 one of 128 tokens and W3 32 at once. Times are from the first token on, for
W3 from the start. Printed are medians, the ratio of each pair, and how many proposed tokens were right in the
last one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching import MODE_CHOICES
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.serving.loading import EngineOptions, make_engine
from shortfin_apps.llm.serving.speculative_loading import DraftFiles
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from shortfin_apps.llm.tools.bench.prose import text

PLAIN = "off"  # the baseline setting
GREEDY: Mapping[str, Any] = {"temperature": 0.0}
SAMPLED: Mapping[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
TASKS = ("edit", "summary", "story", "W1", "W3")
CODE = Path(__file__).parents[1] / "shortfin_apps/llm/components/kvcache/page_pool.py"
REPORT = """\
The harbour of Velden was rebuilt between 1951 and 1958 after the flood of 1949 had destroyed both \
of its moles. The engineer Marta Oelrich proposed a single curved mole of 640 metres, which the \
council refused twice because of its cost, and accepted in March 1952 after a second flood. Work \
began in May 1952 with stone from the quarries at Brandt. In 1954 the ground under the outer third \
gave way, and 42 metres of the mole sank within a night. Oelrich had the section founded on timber \
piles, a method that older engineers thought outdated. The mole was finished in October 1957, and \
the lighthouse at its end was lit on 3 February 1958. It has withstood every storm since, among them \
that of 1976, which flooded the towns on both sides of Velden. The fishing fleet grew from 31 boats \
in 1958 to 112 in 1980. Today the harbour is used by ferries and by sailing boats, and the mole is \
protected as a monument of engineering."""


def _edit() -> str:
    code = CODE.read_text(encoding="utf-8")
    return f"Repeat this Python code, but rename `PagePool` to `Pool`:\n\n```python\n{code}```"


QUESTIONS: Mapping[str, Callable[[], str]] = {
    "edit": _edit,
    "summary": lambda: f"Sum up this text in its own words:\n\n{REPORT}",
    "story": lambda: "Write a long story about a lighthouse keeper who finds a map.",
}


@dataclass(frozen=True, slots=True)
class Task:
    """Requests that arrive at once; measured `from_first_token` on, or from the start."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    params: Mapping[str, Any]
    ignore_eos: bool
    from_first_token: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of a task."""

    tokens_per_s: float
    num_proposed: int
    num_accepted: int
    tokens_per_step: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, metavar="DIR", help="a model with a chat template")
    parser.add_argument("--speculative-model", type=Path, metavar="DIR", help="instead of prompt lookup")
    parser.add_argument("--tasks", default=",".join(TASKS), metavar="NAME,...", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--tokens", type=int, default=192, help="of an answer at most, but for W1 and W3")
    parser.add_argument("--repeat", type=int, default=5, help="pairs of turns")
    parser.add_argument("--batch-mode", default="auto", choices=MODE_CHOICES, help="as for `serve`")
    parser.add_argument("--device", default="cpu", help="as for `serve`")
    arguments = parser.parse_args()
    artifact = Artifact.open(arguments.artifact)
    tokenizer = Tokenizer.load(artifact.tokenizer, artifact.tokenizer_config)
    device = open_device(arguments.device)
    try:
        mode = MODE_CHOICES[arguments.batch_mode]()
        plain = EngineOptions(device=arguments.device, mode=mode, prefix_cache="none")
        files, eos_token_ids = _files_of(artifact), tokenizer.eos_token_ids
        engines = {
            setting: make_engine(device, files.config, files.vmfb, files.parameters, eos_token_ids, options)
            for setting, options in _settings(plain, arguments.speculative_model).items()
        }
        other = next(name for name in engines if name != PLAIN)
        print(f"| task | tok/s {PLAIN} | {other} | {other} / {PLAIN} | proposed | right | tokens a step |")
        print("|---|---|---|---|---|---|---|")
        for name in arguments.tasks.split(","):
            turns = _pairs(engines, _task(name, tokenizer, arguments.tokens), arguments.repeat)
            print(f"| {name} | {_summary(turns)} |", flush=True)
    finally:
        device.close()


def _settings(plain: EngineOptions, draft_model: Path | None) -> dict[str, EngineOptions]:
    """Return the options of both engines by name."""
    if draft_model is None:
        return {PLAIN: plain, "ngram": replace(plain, speculative="ngram")}
    return {PLAIN: plain, "draft": replace(plain, draft_model=_files_of(Artifact.open(draft_model)))}


def _files_of(artifact: Artifact) -> DraftFiles:
    return DraftFiles(config=artifact.config, vmfb=artifact.vmfb, parameters=artifact.parameters)


def _task(name: str, tokenizer: Tokenizer, tokens: int) -> Task:
    def chat(question: str, params: Mapping[str, Any]) -> Task:
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": question}])
        return Task([tokenizer.encode(rendered, rendered=True)], tokens, params, False, True)

    def prose(seed: str, count: int) -> Sequence[int]:
        return tokenizer.encode(text(seed, count))[:count]

    match name:
        case "edit" | "summary":
            return chat(QUESTIONS[name](), GREEDY)
        case "story":
            return chat(QUESTIONS[name](), SAMPLED)
        case "W1":
            return Task([prose("w1", 128)], 128, GREEDY, True, True)
        case "W3":
            return Task([prose(str(i), 16 * (i + 1)) for i in range(32)], 64, GREEDY, True, False)
        case _:
            raise SystemExit(f"--tasks: {name} is none of {', '.join(TASKS)}")


class Run:
    """A task in progress on one engine."""

    def __init__(self, engine: Engine, task: Task) -> None:
        self.outputs: dict[str, list[int]] = {str(index): [] for index in range(len(task.prompts))}
        self._engine = engine
        self._duration_s = 0.0
        params = SamplingParams(max_tokens=task.max_tokens, ignore_eos=task.ignore_eos, **task.params)
        for (name, _), prompt in zip(self.outputs.items(), task.prompts, strict=True):
            engine.add(GenerateCall(request_id=name, prompt_token_ids=tuple(prompt), params=params))
        while task.from_first_token and not self._num_tokens:
            self.step()
        self._before, self._began, self._duration_s = self._num_tokens, engine.stats(), 0.0

    @property
    def is_over(self) -> bool:
        return not self._engine.has_work

    @property
    def _num_tokens(self) -> int:
        return sum(map(len, self.outputs.values()))

    def step(self) -> None:
        began_s = time.perf_counter()
        deltas = self._engine.step()
        self._duration_s += time.perf_counter() - began_s
        for delta in deltas:
            self.outputs[delta.request_id] += delta.token_ids

    def turn(self) -> Turn:
        began, ended = self._began, self._engine.stats()
        proposed = accepted = 0
        if began.speculation is not None and ended.speculation is not None:
            proposed = ended.speculation.proposed - began.speculation.proposed
            accepted = ended.speculation.accepted - began.speculation.accepted
        num_tokens = self._num_tokens - self._before
        return Turn(
            num_tokens / self._duration_s, proposed, accepted, num_tokens / (ended.steps - began.steps)
        )


def _pairs(engines: Mapping[str, Engine], task: Task, repeat: int) -> dict[str, list[Turn]]:
    """Run the settings in pairs, alternating steps, as the machine's speed may change at any time."""
    turns: dict[str, list[Turn]] = {setting: [] for setting in engines}
    for _ in range(repeat):
        runs = {setting: Run(engines[setting], task) for setting in engines}
        for number in count():
            left = [run for run in runs.values() if not run.is_over]
            for run in left if number % 2 else reversed(left):
                run.step()
            if not left:
                break
        off, other = (run.outputs for run in runs.values())
        assert off == other, "speculation has changed the tokens"
        for setting, run in runs.items():
            turns[setting].append(run.turn())
    return turns


def _summary(turns: Mapping[str, Sequence[Turn]]) -> str:
    pairs = zip(*turns.values(), strict=True)
    ratios = sorted(other.tokens_per_s / off.tokens_per_s for off, other in pairs)
    speeds = [statistics.median(turn.tokens_per_s for turn in each) for each in turns.values()]
    last = list(turns.values())[-1][-1]
    return " | ".join(
        [
            *(f"{speed:.0f}" for speed in speeds),
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            f"{last.num_proposed}",
            f"{last.num_accepted}",
            f"{last.tokens_per_step:.2f}",
        ]
    )


if __name__ == "__main__":
    main()
