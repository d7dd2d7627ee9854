"""Padding as a function of the compiled shapes: W1 to W5 on simulated time, for sets of prefill batch sizes.

    python -m bench.buckets                          # the sets in bench/README.md; from the repository's root
    python -m bench.buckets --sizes 1,4 --sizes 1,2,4 --entries

The scheduler, the modes and the runner are the server's own; the device is that of
`tests/components/simulation.py`, whose invocations take time in proportion to their rows, padding included.
Besides the presets there are two clients at a time (C2), and eight with short prompts of any length (S8).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shortfin_apps.llm.components.invocation.entry_counts import EntryCounts
from shortfin_apps.llm.tools.bench.workload import PRESETS, Workload
from tests.components.simulation import CostModel, Simulation, smollm2_config

# SmolLM2-135M in bf16 on 2 cores of an AMD EPYC with AVX-512-BF16: prefills of 128 and 512 tokens in 37 and
# 171 ms, decodes of 1, 8 and 32 rows in 5, 7 and 18.
COST = CostModel(least_s=5e-3, overhead_s=2e-3, row_s=0.29e-3, decode_row_s=0.5e-3, key_s=0.1e-6)
SETS = ((1,), (1, 4), (1, 2), (1, 2, 4), (1, 2, 3, 4), (1, 2, 4, 8), (1, 2, 3, 4, 6, 8))
MODES = ("default", "extend-attention")
MIXED = tuple(16 + index * 37 % 100 for index in range(64))
WORKLOADS = (
    *PRESETS.values(),
    Workload(name="C2", about="2 clients, 128 in", prompt_tokens=(128,) * 8, output_tokens=32, concurrency=2),
    Workload(
        name="S8", about="8 clients, 16 to 115 in", prompt_tokens=MIXED, output_tokens=32, concurrency=8
    ),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """The rows computed by one entry in a pass."""

    invocations: int
    real: int
    padded: int


@dataclass(frozen=True, slots=True)
class Pass:
    name: str
    seconds: float
    entries: Mapping[str, Entry]

    def padding(self, prefix: str = "") -> float:
        """Return the share of padding in the rows of entries with this name prefix."""
        entries = [entry for name, entry in self.entries.items() if name.startswith(prefix)]
        padded = sum(entry.padded for entry in entries)
        return padded / max(1, padded + sum(entry.real for entry in entries))

    @property
    def steps(self) -> int:
        return sum(entry.invocations for entry in self.entries.values())


def passes(workload: Workload, mode: str, sizes: tuple[int, ...]) -> Iterator[Pass]:
    """Yield the workload's passes on one server; the second finds the first one's prefix in the cache."""
    simulation = Simulation(COST, mode, config=replace(smollm2_config(), prefill_batch_sizes=sizes))
    prefix = [index % 32 for index in range(workload.shared_prefix_tokens)]
    for name in workload.passes:
        before, began_s = simulation.runner.counts(), simulation.clock.now_s
        simulation.serve(workload.prompt_tokens, workload.output_tokens, workload.concurrency, prefix)
        entries = {
            entry: _since(counts, before.get(entry, EntryCounts()))
            for entry, counts in simulation.runner.counts().items()
        }
        ran = {entry: counts for entry, counts in entries.items() if counts.invocations}
        yield Pass(name, simulation.clock.now_s - began_s, ran)


def _since(counts: EntryCounts, before: EntryCounts) -> Entry:
    return Entry(
        counts.invocations - before.invocations,
        _real(counts) - _real(before),
        counts.padded_tokens - before.padded_tokens,
    )


def _real(counts: EntryCounts) -> int:
    return counts.prefill_tokens.total + counts.decode_tokens.total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", action="append", metavar="N,N,...", help="a set of prefill batch sizes")
    parser.add_argument("--entries", action="store_true", help="also what each entry computed")
    arguments = parser.parse_args()
    sets = [tuple(map(int, text.split(","))) for text in arguments.sizes or ()] or SETS
    print("| mode | sizes | pass | steps | seconds | padding of prefills | of all rows |")
    print("|---|---|---|---|---|---|---|")
    for mode in MODES:
        # Extends have no padding, so sizes do not matter to them.
        for sizes in sets if mode == "default" else sets[-1:]:
            for workload in WORKLOADS:
                for measured in passes(workload, mode, sizes):
                    _print(mode, sizes, measured, with_entries=arguments.entries)


def _print(mode: str, sizes: Sequence[int], measured: Pass, *, with_entries: bool) -> None:
    shares = " | ".join(f"{measured.padding(prefix):.1%}" for prefix in ("prefill", ""))
    names = f"| {mode} | {','.join(map(str, sizes))} | {measured.name}"
    print(f"{names} | {measured.steps} | {measured.seconds:.3f} | {shares} |")
    if with_entries:
        for name, entry in measured.entries.items():
            print(f"    {name}: {entry.invocations} invocations, {entry.real} rows, {entry.padded} padded")


if __name__ == "__main__":
    main()
