"""Opens an artefact and replays a dump on it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.invocation.page_table import make_runner
from shortfin_apps.llm.components.invocation.static_threshold import with_static_threshold
from shortfin_apps.llm.components.recorder.dump_file import Dump, DumpError
from shortfin_apps.llm.components.recorder.records import Header
from shortfin_apps.llm.components.runtime.check import check_program
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.runtime.open import Runtime, host_of, open_device
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.tools.bench.roofline.counts import open_emulated_gpu
from shortfin_apps.llm.tools.dump_replay.replay import Outcome, Replay, Verdict

NUM_SHOWN = 50  # maximum number of kept outcomes other than SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The device of a replay; `emulated` selects an emulated AMD GPU, which also checks the kernels."""

    device: str = "cpu"
    runtime: Runtime = "auto"
    threads: int | None = None
    device_ids: tuple[str, ...] = ()
    emulated: bool = False


@dataclass(slots=True, kw_only=True)
class Summary:
    """The results of a replay. `notable` are the first NUM_SHOWN outcomes other than SAME."""

    program: str
    is_same_program: bool
    counts: Counter[Verdict] = field(default_factory=Counter)
    notable: list[Outcome] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    prefilled_tokens: int = 0
    first_exact: int | None = None  # number of the record from which on all records are compared

    @property
    def is_as_recorded(self) -> bool:
        """Whether all compared results match the server's and there are no findings."""
        wrong = (Verdict.DIFFERS, Verdict.FAILED, Verdict.NOT_REPRODUCED)
        return not self.findings and not any(self.counts[verdict] for verdict in wrong)


def replay(
    dump: Dump,
    directory: Path,
    where: Where,
    *,
    first: int = 0,
    last: int | None = None,
    on_record: Callable[[], None] = lambda: None,
) -> Summary:
    """Replay a dump on the artefact in `directory`; call `on_record` after each record.

    Raises DumpError, ArtifactError and InvalidRequestError.
    """
    if where.emulated:
        artifact = Artifact.open(directory, for_this_host=False)  # the first program is a GPU's, if any is
    else:
        artifact = Artifact.open(directory, host=host_of(where.device, where.device_ids))
    is_same = _is_same_program(artifact, dump.header)
    summary = Summary(program=str(directory), is_same_program=is_same)
    with _opened(artifact, where) as (device, findings):
        program = device.load_program(artifact.vmfb, artifact.parameters, artifact.config.module_name)
        check_program(program, artifact.config)
        threshold = dump.header.settings.get("static_threshold")
        if is_same and isinstance(threshold, int):  # the records name entries that the server chose under it
            program = with_static_threshold(program, threshold)
        if artifact.config.stride != dump.header.stride:
            raise DumpError(
                f"{directory}: has pages of {artifact.config.stride} tokens, and the dump's have "
                f"{dump.header.stride}: it is of another model"
            )
        runner = make_runner(
            device, program, artifact.config, dump.header.num_pages, dump.header.num_window_pages
        )
        replaying = Replay(
            dump, runner, artifact.config, vocab_size=artifact.vocab_size, is_same_program=is_same
        )
        for outcome in replaying.run(first, last):
            _add(summary, outcome)
            on_record()
        summary.prefilled_tokens = replaying.prefilled_tokens
        summary.findings += [*replaying.findings, *findings()]
    return summary


def _add(summary: Summary, outcome: Outcome) -> None:
    summary.counts[outcome.verdict] += 1
    if outcome.verdict is Verdict.NOT_COMPARED:
        summary.first_exact = None
    elif summary.first_exact is None:
        summary.first_exact = outcome.record.number
    if outcome.verdict is not Verdict.SAME and len(summary.notable) < NUM_SHOWN:
        summary.notable.append(outcome)


def _is_same_program(artifact: Artifact, header: Header) -> bool:
    """Whether the artefact's program and parameters are the server's; True if the hashes are unknown."""
    manifest = artifact.manifest
    if manifest is None or not header.files:
        return True
    names = [path.name for path in (artifact.vmfb, *artifact.parameters)]
    return sorted(manifest.files[name].sha256 for name in names) == sorted(header.files.values())


@contextlib.contextmanager
def _opened(artifact: Artifact, where: Where) -> Iterator[tuple[Device, Callable[[], list[str]]]]:
    """Open the device; yield it and a function that returns an emulated device's findings so far."""
    findings: Callable[[], list[str]] = list
    if where.emulated:
        assert artifact.manifest is not None, "a directory has one"
        target = artifact.manifest.program.target
        if target.architecture != "amdgpu":
            raise InvalidRequestError(
                f"it was built for {target.device}, and --emulated is an AMD GPU: build "
                "the model with `--device hip:gfx942`",
                "emulated",
            )
        gpu = open_emulated_gpu(target.cpu)

        def findings() -> list[str]:
            report = gpu.report()
            found = [f"{f.kind}: {f.kernel}: {f.instruction} at {f.address:#x}" for f in report.findings]
            return found + [f"{misuse.what}: {misuse.text}" for misuse in report.misuses]

    name = "hip" if where.emulated else where.device
    device = open_device(name, where.runtime, threads=where.threads, device_ids=where.device_ids)
    with contextlib.closing(device):
        yield device, findings
