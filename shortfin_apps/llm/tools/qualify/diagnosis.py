"""Tells faults of a device apart by running the self-test again.

two further runs differ, or are right again                            missing wait, or another race
they are alike, wrong, and right when loaded again                     stale weights
they are alike, and wrong when loaded again; the files are as built    wrong kernel result
they are alike, and wrong when loaded again; a file is not as built    damaged file
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shortfin_apps.llm.artifact.file_record import FileRecord, wrong_files
from shortfin_apps.llm.components.self_test import report
from shortfin_apps.llm.components.self_test.self_test import EntryFailure, Key, Outcome
from shortfin_apps.llm.tools.qualify.bench import Bench, LoadedModel
from shortfin_apps.llm.tools.qualify.outcome import Failed, Fault, Passed

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
    known = known or (None if failures else runs[0].bits)
    third, fourth = model.self_test(), model.self_test()
    found = fourth.failures(same_bits=model.same_bits, known_bits=known)
    figures = {
        "failures_of_first_run": [f"{each.entry}: {each.problem}" for each in failures],
        "failures_of_fourth_run": [f"{each.entry}: {each.problem}" for each in found],
        "other_bits_in_second_run": differing(*runs),
        "other_bits_in_fourth_run": differing(third, fourth),
    }
    if unsteady := differing(third, fourth):
        text = f"`{unsteady[0]}`{_others(unsteady)} gave other bits in another run on the same inputs"
        return Failed(Fault.MISSING_WAIT, text, figures)
    if not found:
        wrong = [each.entry for each in failures] or differing(*runs)
        text = f"`{wrong[0]}`{_others(wrong)} gave a wrong result, and the right one in later runs"
        return Failed(Fault.MISSING_WAIT, text, figures)
    names = [each.entry for each in found]
    if not bench.reload().self_test().failures(same_bits=model.same_bits, known_bits=known):
        text = (
            f"`{names[0]}`{_others(names)} {found[0].problem}, and is right with the parameters loaded again"
        )
        return Failed(Fault.STALE_WEIGHTS, text, figures)
    if damaged := damaged_files(bench):
        name, problem = next(iter(damaged.items()))
        return Failed(Fault.DAMAGED_FILE, f"{name} {problem}", {**figures, "files": damaged})
    subject = report.Subject(device=model.device.name, kernels=model.kernels)
    text = report.sentence(subject, found, model.locate(found, fourth)).removeprefix("self-test: ")
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
