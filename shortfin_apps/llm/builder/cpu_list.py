"""CPU lists of `--device cpu:NAME,NAME`, for artefacts with programs for several CPUs."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.host_cpu import decisive_features

HOST = "host"


def resolve_targets(device: str) -> tuple[Target, ...]:
    """Resolve a `--device` value to targets, best first: several for a list of CPUs, otherwise one.

    The `device` of each target is the `--device` value for this target alone. Duplicates are dropped. Raises
    BuildError if the compiler does not know a CPU, or if the CPUs are of two architectures.
    """
    names = cpu_names(device)
    if not names:
        return (resolve_target(device),)
    targets = [resolve_target(_device_of(name)) for name in names]
    _check_architecture(targets)
    kept: dict[object, Target] = {}
    for each in sorted(targets, key=preference, reverse=True):
        kept.setdefault((each.cpu, each.features), each)
    return tuple(kept.values())


def cpu_names(device: str) -> list[str]:
    """Return the distinct names in a list of CPUs, or [] for other devices.

    Raises BuildError for empty names.
    """
    kind, _, listed = device.partition(":")
    if kind != "cpu" or "," not in listed:
        return []
    names = [name.strip() for name in listed.split(",")]
    if not all(names):
        raise BuildError(f"{device}: give a CPU before and after each comma, as in cpu:x86-64-v3,x86-64-v4")
    return list(dict.fromkeys(names))


def listed_device(targets: Sequence[Target]) -> str:
    """Return the `--device` value that lists these targets in order."""
    if len(targets) == 1:
        return targets[0].device
    return f"cpu:{','.join(map(cpu_name, targets))}"


def cpu_name(target: Target) -> str:
    """Return the CPU's name in a list: LLVM's name, or `host`."""
    return target.device.partition(":")[2] or HOST


def preference(target: Target) -> tuple[bool, bool, bool, int]:
    """Return the sort key of a CPU target: among targets that a host can execute, the greatest is best.

    CPUs with AMX tiles rank above CPUs with only AVX-512, which rank above CPUs with only AVX2. A CPU with a
    strict superset of another's features ranks higher.
    """
    has_avx2 = "avx2" in target.features
    return target.has_amx, target.has_wide_vectors, has_avx2, len(decisive_features(target.features))


def _device_of(name: str) -> str:
    return "cpu" if name == HOST else f"cpu:{name}"


def _check_architecture(targets: Sequence[Target]) -> None:
    first = targets[0]
    for other in targets[1:]:
        if other.architecture != first.architecture:
            raise BuildError(
                f"{cpu_name(first)} is a CPU of {first.architecture} and {cpu_name(other)} one of "
                f"{other.architecture}; an artefact is for CPUs of one architecture, so build one for each"
            )
