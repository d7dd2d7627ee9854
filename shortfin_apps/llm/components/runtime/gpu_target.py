"""The error for a VMFB that was compiled for another chip than the GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.gpu_code.code_object import chip_of, code_objects_in


def wrong_chip_error(vmfb: Path) -> ArtifactError:
    """Returns the error for a VMFB with machine code that HIP refused as another chip's."""
    chips = ", ".join(sorted(set(_chips_of(vmfb)))) or "another chip"
    return ArtifactError(
        f"{vmfb}: compiled for {chips}, which the GPU is not (HIP calls it {', '.join(_gpu_names())}); "
        "rebuild it with `shortfin-llm build --device hip:CHIP`, or choose another GPU with --device-ids"
    )


def _chips_of(vmfb: Path) -> Iterator[str]:
    for data in code_objects_in(vmfb.read_bytes()):
        try:
            yield chip_of(data)
        except ArtifactError:  # an unknown chip
            continue


def _gpu_names() -> list[str]:
    """Returns HIP's names of the GPUs; shortfin only reports their ids."""
    import iree.runtime as iree

    return sorted({device["name"] for device in iree.get_driver("hip").query_available_devices()})
