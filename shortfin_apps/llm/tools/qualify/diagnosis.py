"""Tells faults of a device apart by running the self-test again.

    a run differs from the next one on the same program                   missing wait, or a race
    steady but wrong or changed, and right when loaded again              stale weights
    wrong again after another load, and the files are as built            wrong kernel result
    wrong again after another load, and a file is not as built            damaged file
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shortfin_apps.llm.artifact.file_record import FileRecord, wrong_files
from shortfin_apps.llm.components.self_test import report
from shortfin_apps.llm.components.self_test.self_test import EntryFailure, Key, Outcome
from shortfin_apps.llm.tools.qualify.bench import Bench, LoadedModel
from shortfin_apps.llm.tools.qualify.check import Failed, Fault, Passed

Bits = Mapping[Key, bytes]


def examine(bench: Bench, model: LoadedModel, known: Bits | None = None) -> tuple[Passed, Bits]:
    """Run the self-test twice; return its result and bits. Raises Failed, which names the fault.

    `known`: the bits that the same program gave earlier.
    """
    first = model.self_test()
    second = model.self_test()
    failures = first.failures(same_bits=model.same_bits, known_bits=known)
    changed = differing(first, second)
    if failures or changed:
        raise _diagnosis(bench, model, known, (first, second), failures)
    errors = {entry: worst.error for entry in first.entries if (worst := first.worst(entry)) is not None}
    others = sorted(first.differing_bits())
    text = f"{len(first.entries)} entries are right, twice with the same bits"
    if first.untested:
        text += f"; too few pages for {', '.join(first.untested)}"
    figures = {
        "largest_error": max(errors.values(), default=0.0),
        "allowed_error": model.file.tolerance,
        "errors": errors,
        "entries_with_other_bits": others,
    }
    return Passed(f"{text}; largest error {figures['largest_error']:.2g}", figures), first.bits


def differing(first: Outcome, second: Outcome) -> list[str]:
    """Return the entries with other bits, or another failure, in the second run."""
    others = {key[0] for key, bits in second.bits.items() if first.bits.get(key, bits) != bits}
    return sorted(others | (first.broken.keys() ^ second.broken.keys()))


def _diagnosis(
    bench: Bench,
    model: LoadedModel,
    known: Bits | None,
    runs: tuple[Outcome, Outcome],
    failures: Sequence[EntryFailure],
) -> Failed:
    third = model.self_test()
    figures = {
        "failures": [f"{each.entry}: {each.problem}" for each in failures],
        "other_bits_in_second_run": differing(*runs),
        "other_bits_in_third_run": differing(runs[1], third),
    }
    if unsteady := differing(runs[1], third):
        text = f"`{unsteady[0]}` gave other bits in another run on the same inputs"
        return Failed(Fault.MISSING_WAIT, f"{text}{_others(unsteady)}", figures)
    again = bench.reload().self_test()
    if not again.failures(same_bits=model.same_bits, known_bits=known or _usual(runs, failures)):
        wrong = [each.entry for each in failures] or differing(*runs)
        text = f"`{wrong[0]}` is wrong{_others(wrong)}; right after loading the same parameters again"
        return Failed(Fault.STALE_WEIGHTS, text, figures)
    found = third.failures(same_bits=model.same_bits, known_bits=known)
    return _wrong(bench, model, found or list(failures), third, figures)


def _usual(runs: tuple[Outcome, Outcome], failures: Sequence[EntryFailure]) -> Bits:
    """Return the bits of a first run that was right; empty if it was not."""
    return {} if failures else runs[0].bits


def _wrong(
    bench: Bench,
    model: LoadedModel,
    failures: list[EntryFailure],
    outcome: Outcome,
    figures: Mapping[str, object],
) -> Failed:
    if damaged := damaged_files(bench):
        name, problem = next(iter(damaged.items()))
        return Failed(Fault.DAMAGED_FILE, f"{name} {problem}", {**figures, "files": damaged})
    if not failures:  # wrong only in a run that cannot be repeated
        return Failed(Fault.MISSING_WAIT, "an entry was wrong once, and right afterwards", figures)
    subject = report.Subject(device=model.device.name, kernels=model.kernels)
    location = model.locate(failures, outcome)
    text = report.sentence(subject, failures, location).removeprefix("self-test: ")
    return Failed(Fault.WRONG_KERNEL, text, {**figures, "kernels": list(model.kernels)})


def damaged_files(bench: Bench) -> dict[str, str]:
    """Return the subject's files that differ from the manifest's record, with how they differ."""
    artifact = bench.artifact
    assert artifact.manifest is not None, "a directory has one"
    names = {path.name for path in (artifact.vmfb, *artifact.parameters)}
    files: dict[str, FileRecord] = artifact.manifest.files
    # Of an artefact with programs for other devices, only what runs here.
    programs = {name for each in artifact.manifest.programs for name in each.files}
    checked = {name: file for name, file in files.items() if name in names or name not in programs}
    return wrong_files(Path(artifact.vmfb.parent), checked)


def _others(entries: Sequence[str]) -> str:
    return f" (and {len(entries) - 1} more)" if len(entries) > 1 else ""
