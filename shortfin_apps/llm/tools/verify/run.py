"""Verifies an artefact: its files, then each of its programs on each device that can run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from shortfin_apps.llm.artifact.artifact import Artifact, Manifest
from shortfin_apps.llm.artifact.file_names import SELF_TEST
from shortfin_apps.llm.artifact.file_record import wrong_files
from shortfin_apps.llm.artifact.program_record import ProgramRecord, choose_program
from shortfin_apps.llm.components.invocation.page_table import make_page_cache, make_runner
from shortfin_apps.llm.components.runtime.check import check_program
from shortfin_apps.llm.components.runtime.open import hosts_at_hand, open_device
from shortfin_apps.llm.components.self_test import report
from shortfin_apps.llm.components.self_test.locate import Location, Locator
from shortfin_apps.llm.components.self_test.self_test import EntryFailure, Outcome, SelfTest
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError, DeviceLostError
from shortfin_apps.llm.contract.host_gpu import HostGpu
from shortfin_apps.llm.contract.self_test_file import SelfTestFile

# Pages per sequence of a batch, besides SHARED_PAGES that all sequences share.
ROW_PAGES = 3
SHARED_PAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """The results of one program on one device; `problem`: why the program could not run, None if it did."""

    program: str
    device: str
    outcome: Outcome | None = None
    failures: tuple[EntryFailure, ...] = ()
    location: Location | None = None
    differing_bits: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def is_right(self) -> bool:
        return self.problem is None and not self.failures


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """All results.

    `untested`: why no program was run; None if one was, or if files that the test needs are wrong or missing.
    """

    directory: Path
    manifest: Manifest
    wrong_files: dict[str, str]
    results: tuple[ProgramResult, ...]
    untested: str | None

    @property
    def is_tested(self) -> bool:
        return bool(self.results)

    @property
    def is_right(self) -> bool:
        return not self.wrong_files and all(each.is_right for each in self.results)


def verify(directory: Path, *, threads: int | None = None) -> Verified:
    """Verify an artefact's files and programs.

    Raises ArtifactError if `directory` is no artefact, or if the installed IREE release cannot load it.
    """
    artifact = Artifact.open(directory, for_this_host=False, check_sizes=False)
    manifest = artifact.manifest
    assert manifest is not None, "an artefact has one"
    missing = {name: "is missing" for name in manifest.files if not (directory / name).is_file()}
    there = {name: each for name, each in manifest.files.items() if name not in missing}
    wrong = missing | wrong_files(directory, there)  # a copy without some files is hashed, too
    testable = [
        each
        for each in manifest.programs
        if each.config not in wrong and missing.keys().isdisjoint(each.files)
    ]
    results: list[ProgramResult] = []
    untested = None
    if artifact.self_test is None:
        untested = "it has no self-test; `shortfin-llm build` adds one"
    elif SELF_TEST not in wrong and testable:
        file = SelfTestFile.load(artifact.self_test)
        for program, kind, ids in _places(testable):
            results.append(_tested(artifact, program, kind, ids, file, threads))
        if not results:
            names = ", ".join(each.target.description for each in testable)
            untested = f"no device here runs its programs, which are for {names}"
    return Verified(
        directory=directory, manifest=manifest, wrong_files=wrong, results=tuple(results), untested=untested
    )


def _places(programs: Sequence[ProgramRecord]) -> Iterator[tuple[ProgramRecord, str, tuple[str, ...]]]:
    """Yield each program with each available device that can run it: the device's kind, and ids for GPUs."""
    hosts = {kind: hosts_at_hand(kind) for kind in {each.target.kind for each in programs}}
    for program in programs:
        kind = program.target.kind
        for host in hosts[kind]:
            if choose_program([program], host):
                yield program, kind, (str(host.ordinal),) if isinstance(host, HostGpu) else ()


def self_test_pages(config: ModelConfig) -> int:
    """Return the number of pages with which the self-test can fill the largest batch of every entry."""
    return SHARED_PAGES + max(ROW_PAGES * max(config.prefill_batch_sizes), *config.decode_batch_sizes, 32)


def _tested(
    artifact: Artifact,
    program: ProgramRecord,
    kind: str,
    device_ids: tuple[str, ...],
    file: SelfTestFile,
    threads: int | None,
) -> ProgramResult:
    name = program.target.name
    try:
        artifact = Artifact.open(
            artifact.vmfb.parent, for_this_host=False, check_sizes=False, name=program.target.name
        )
        config = artifact.config
        with closing(open_device(kind, threads=threads, device_ids=device_ids)) as device:
            loaded = device.load_program(artifact.vmfb, artifact.parameters, config.module_name)
            check_program(loaded, config)
            num_pages = self_test_pages(config)
            num_window_pages = 0 if config.window_tokens is None else num_pages
            runner = make_runner(device, loaded, config, num_pages, num_window_pages)
            cache = make_page_cache(config, "none", num_pages, num_window_pages)
            outcome = SelfTest(runner, cache, file).run()
            same_bits = program.target.gives_same_bits
            failures = outcome.failures(same_bits=same_bits)
            locator = Locator(device, loaded, config, file, same_bits)
            return ProgramResult(
                program=name,
                device=device.name,
                outcome=outcome,
                failures=tuple(failures),
                location=locator.locate_first(failures, outcome),
                differing_bits=tuple(outcome.differing_bits()),
            )
    except (ArtifactError, DeviceLostError) as error:
        return ProgramResult(program=name, device=kind, problem=str(error))


def tables(found: Verified) -> Iterator[Table | str]:
    """Yield lines about files, a table of entries per program, and a line if nothing was tested."""
    count = len(found.manifest.files)
    if not found.wrong_files:
        yield f"{found.directory}: all {count} files are unchanged since the build"
    for name, problem in found.wrong_files.items():
        yield f"{found.directory / name}: {problem}"
    for result in found.results:
        yield from _program(found, result)
    if found.untested is not None:
        yield f"not tested: {found.untested}"


def _program(found: Verified, result: ProgramResult) -> Iterator[Table | str]:
    title = f"program for {result.program} on {result.device}"
    if result.outcome is None:
        yield f"{title}: {result.problem}"
        return
    allowed = f"{result.outcome.file.tolerance:.2g}"
    table = Table("entry", "rows", f"error (allowed {allowed})", "bits", "result", title=title)
    failures = {each.entry: each.problem for each in result.failures}
    for entry in result.outcome.entries:
        rows = [row for row in result.outcome.rows if row.entry == entry]
        errors = [row.error for row in rows if not row.is_drawn]
        table.add_row(
            entry,
            str(len(rows)),
            f"{max(errors):.2g}" if errors else "",
            ("differ" if entry in result.differing_bits else "same") if errors else "",
            failures.get(entry) or ("ok" if rows else "too few pages"),
        )
    yield table
    if result.failures:
        subject = report.Subject(device=result.device, kernels=_kernels(found, result))
        yield report.sentence(subject, result.failures, result.location)


def document(found: Verified) -> dict[str, Any]:
    return {
        "directory": str(found.directory),
        "is_right": found.is_right,
        "wrong_files": found.wrong_files,
        "untested": found.untested,
        "programs": [_program_document(found, each) for each in found.results],
    }


def _program_document(found: Verified, result: ProgramResult) -> dict[str, Any]:
    head: dict[str, Any] = {
        "program": result.program,
        "is_right": result.is_right,
        "problem": result.problem,
        "differing_bits": list(result.differing_bits),
    }
    if result.outcome is None:
        return {**head, "device": result.device}
    kernels = _kernels(found, result)
    subject = report.Subject(device=result.device, identity=found.manifest.identity, kernels=kernels)
    return {**head, **report.document(subject, result.outcome, result.failures, result.location)}


def _kernels(found: Verified, result: ProgramResult) -> tuple[str, ...]:
    return next(each.kernels for each in found.manifest.programs if each.target.name == result.program)
