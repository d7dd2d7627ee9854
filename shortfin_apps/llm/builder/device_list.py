"""Device lists of `--device cpu:NAME,NAME,hip:CHIP`, for artefacts with programs for several devices."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.contract.device_names import KINDS, kind_of, name_of, split_devices
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.host_cpu import decisive_features


def resolve_targets(device: str) -> tuple[Target, ...]:
    """Resolve a `--device` value to targets: GPUs by name, then CPUs, best first.

    The `device` of each target is the `--device` value for this target alone. Two names of one CPU or GPU
    give one target. Raises BuildError if the compiler does not know a device, or if the CPUs are of two
    architectures.
    """
    targets = [resolve_target(each) for each in split_devices(device)]
    cpus = [each for each in targets if each.is_cpu]
    _check_architecture(cpus)
    gpus = sorted((each for each in targets if not each.is_cpu), key=_gpu_order)
    kept: dict[object, Target] = {}
    for each in [*gpus, *sorted(cpus, key=preference, reverse=True)]:
        kept.setdefault((each.cpu, each.features), each)
    return tuple(kept.values())


def preference(target: Target) -> tuple[bool, bool, bool, int]:
    """Return the sort key of a CPU target: among targets that a host can execute, the greatest is best.

    CPUs with AMX tiles rank above CPUs with only AVX-512, which rank above CPUs with only AVX2. A CPU with a
    strict superset of another's features ranks higher.
    """
    has_avx2 = "avx2" in target.features
    return target.has_amx, target.has_wide_vectors, has_avx2, len(decisive_features(target.features))


def _gpu_order(target: Target) -> tuple[int, str]:
    return KINDS.index(kind_of(target.device)), target.device


def _check_architecture(cpus: Sequence[Target]) -> None:
    for other in cpus[1:]:
        if other.architecture != cpus[0].architecture:
            first, second = (
                f"{name_of(each.device)} is a CPU of {each.architecture}" for each in (cpus[0], other)
            )
            raise BuildError(
                f"{first}, and {second}; an artefact is for CPUs of one architecture, so build one for each"
            )
