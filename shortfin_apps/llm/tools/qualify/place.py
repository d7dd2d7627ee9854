"""Chooses what to qualify: one device, an artefact's program for it, and the GPU that runs it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from shortfin_apps.llm.artifact.artifact import Manifest, fitting_host
from shortfin_apps.llm.artifact.file_names import MANIFEST
from shortfin_apps.llm.artifact.program_record import Host, ProgramRecord, choose_program
from shortfin_apps.llm.components.runtime.device import GPU_NAMES
from shortfin_apps.llm.components.runtime.open import hosts_at_hand
from shortfin_apps.llm.contract.device_names import CPU, KINDS, kind_of, split_devices
from shortfin_apps.llm.contract.errors import ArtifactError, BuildError, InvalidRequestError
from shortfin_apps.llm.contract.host_gpu import AUTO, HostGpu, amd_chips, device_of_this_machine


def named_device(given: str | None) -> str | None:
    """Return the one device of `--device`; None for `auto` or none. Raises LlmError for several."""
    if given is None or given == AUTO:
        return None
    devices = split_devices(given)
    if len(devices) > 1:
        raise InvalidRequestError(
            f"`--device {given}` names {len(devices)} devices, and one is tested at a time: give "
            f"`--device {devices[0]}`",
            "device",
        )
    if kind_of(devices[0]) not in KINDS:
        raise BuildError(f"unknown device {given!r}; give one of {', '.join(KINDS)}, as in hip:gfx942")
    return devices[0]


def device_to_build(given: str | None, tell: Callable[[str], None]) -> str:
    """Return the device to build for, with its chip; without `given`, this machine's. Raises LlmError."""
    device = named_device(given)
    if device is None:
        found, reason = device_of_this_machine()
        tell(f"this machine's device: {found}, {reason}")
        return split_devices(found)[0]
    if device == CPU or find_spec("iree.compiler") is None:
        return device
    from shortfin_apps.llm.builder.device_list import resolve_targets  # asks the compiler

    return resolve_targets(device)[0].device


def program_to_test(folder: Path, given: str | None) -> tuple[ProgramRecord, Manifest]:
    """Return the program that `serve` would choose on this machine, among those for `--device`.

    A GPU's only program is also returned on a machine without such a GPU: then the report says why it does
    not open. Raises LlmError.
    """
    manifest, device = Manifest.load(folder / MANIFEST), named_device(given)
    programs = manifest.programs
    named = [each for each in programs if device in (None, each.target.device, each.target.kind)]
    if not named:
        raise ArtifactError(f"{folder} was built for {manifest.device}; leave out `--device {given}`")
    if len(programs) == 1:
        return programs[0], manifest
    for kind in dict.fromkeys(each.target.kind for each in named):
        for host in _at_hand(kind):
            if (best := choose_program(programs, host)) in named and best is not None:
                return best, manifest
    if device is None:
        fitting_host(folder, _at_hand)  # raises, and says what to build
    if len(named) == 1 and named[0].target.kind != CPU:
        return named[0], manifest
    raise ArtifactError(
        f"{folder}: this machine does not run its program for {given}, or runs another one better; leave out "
        f"`--device {given}`"
    )


def device_ids(device: str) -> tuple[str, ...]:
    """Return the id of the first GPU that runs code for `device`; none for a CPU, and for the first GPU.

    Raises ArtifactError if there are only others.
    """
    kind, _, chip = device.partition(":")
    hosts = [host for host in hosts_at_hand(kind) if isinstance(host, HostGpu)] if kind in GPU_NAMES else []
    if not hosts or not chip:
        return ()
    for host in hosts:
        if host.runs(chip):
            return (str(host.ordinal),) if host.ordinal else ()
    raise ArtifactError(f"no GPU here runs code for {chip}: there is {', '.join(h.device for h in hosts)}")


def _at_hand(kind: str) -> list[Host]:
    """Return this machine's devices of a kind, also AMD GPUs that the kernel has and the driver denies.

    Otherwise the CPU would be tested in their place, and pass.
    """
    found: list[Host] = list(hosts_at_hand(kind))
    if not found and kind == "hip":
        found += [HostGpu("hip", chip) for chip in amd_chips()]
    return found
