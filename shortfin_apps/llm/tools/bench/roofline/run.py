"""Assembles a roofline run from artefact, device, cases and machine limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from shortfin_apps.llm.artifact.artifact import Artifact, fitting_host
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.buckets import Buckets
from shortfin_apps.llm.components.invocation.page_table import make_runner
from shortfin_apps.llm.components.runtime.check import check_program
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.runtime.open import hosts_at_hand, open_device
from shortfin_apps.llm.components.runtime.parameters import parameter_bytes
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.contract.gpu_code.code_object import read_code_objects
from shortfin_apps.llm.contract.gpu_code.occupancy import waves_by_kernel
from shortfin_apps.llm.contract.host_gpu import HostGpu
from shortfin_apps.llm.tools.bench.console import progress_bar
from shortfin_apps.llm.tools.bench.roofline.cases import Case, Choice, CostModel, Work, choose, plans
from shortfin_apps.llm.tools.bench.roofline.counts import count, open_emulated_gpu
from shortfin_apps.llm.tools.bench.roofline.measure import load_machine, measure
from shortfin_apps.llm.tools.bench.roofline.profile import CodeMap, Share, load_code_map, profile
from shortfin_apps.llm.tools.bench.roofline.report import counts_document, document


def roofline(
    directory: Path, choice: Choice, repeats: int, threads: int | None, *, with_profile: bool
) -> dict[str, Any]:
    """Time the artefact's entries; return the JSON document of the run (report.py). Raises LlmError."""
    host = fitting_host(directory, hosts_at_hand)
    artifact = Artifact.open(directory, host=host)
    assert artifact.manifest is not None, "a directory has one"
    ids = (str(host.ordinal),) if isinstance(host, HostGpu) else ()
    with closing(open_device(host.kind, threads=threads, device_ids=ids)) as device:
        runner, cases = _prepare(artifact, device, choice)
        code = load_code_map(artifact.vmfb) if with_profile else None
        machine = load_machine(device, artifact.manifest.spec, artifact.manifest.options)
        with _progress("samples", len(cases) * repeats) as on_sample:
            results = measure(cases, runner, machine, repeats, on_sample)
        profiles = _profiles(code, runner, [case for case, _ in cases]) if code is not None else None
        return document(artifact.manifest, results, profiles)


def roofline_counts(directory: Path, choice: Choice) -> dict[str, Any]:
    """Count the work of the artefact's entries on an emulated AMD GPU; return the JSON document.

    Raises LlmError.
    """
    artifact = Artifact.open(directory, for_this_host=False)  # the first program is a GPU's, if any is
    assert artifact.manifest is not None, "a directory has one"
    target = artifact.manifest.program.target
    if target.architecture != "amdgpu":
        raise InvalidRequestError(
            f"{directory} was built for {target.device}, and --emulated counts what "
            "the machine code of an AMD GPU does: build it with `--device hip:gfx942`",
            "emulated",
        )
    gpu = open_emulated_gpu(target.cpu)
    waves = waves_by_kernel(read_code_objects(artifact.vmfb.read_bytes()))
    with closing(open_device("hip")) as device:
        runner, cases = _prepare(artifact, device, choice)
        with _progress("entries", len(cases)) as on_case:
            return counts_document(artifact.manifest, count(cases, runner, gpu, waves, on_case))


def _prepare(
    artifact: Artifact, device: Device, choice: Choice
) -> tuple[BatchRunner, list[tuple[Case, Work]]]:
    """Load the artefact's program; return its runner, and each chosen case with its minimum work."""
    assert artifact.manifest is not None
    config = artifact.config
    program = device.load_program(artifact.vmfb, artifact.parameters, config.module_name)
    check_program(program, config)
    buckets = Buckets(program.entries, config.stride, has_prefill_position=config.has_prefill_position)
    all_plans = plans(config, choice, has_extend=buckets.has_extend)
    cases = choose(all_plans, buckets, config.stride, choice.patterns)
    num_pages = 1 + max(case.plan.pages(config.stride) for case in cases)
    costs = CostModel(artifact.manifest.spec, config, parameter_bytes(artifact.parameters))
    runner = make_runner(device, program, config, num_pages)
    return runner, [(case, costs.of(case.batch)) for case in cases]


@contextmanager
def _progress(unit: str, total: int) -> Iterator[Callable[[Case], None]]:
    """Show a progress bar. Callers must call the yielded function before each unit of work on a case."""
    with progress_bar(unit) as bar:
        task = bar.add_task("", total=total)
        yield lambda case: bar.update(task, description=case.entry, advance=1)


def _profiles(code: CodeMap, runner: BatchRunner, cases: Sequence[Case]) -> list[list[Share]]:
    with progress_bar("profiles") as bar:
        return [profile(runner, case.batch, code) for case in bar.track(cases)]
