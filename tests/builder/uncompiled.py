"""The MLIR of a model for a GPU whose Triton kernels are not compiled."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import CodeObject
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel
from shortfin_apps.llm.builder.program.module import ModelModule
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec


def no_code(kernels: Sequence[Kernel], architecture: str, chip: str) -> list[CodeObject]:
    """Return code of one byte for each kernel, which IREE accepts until it makes the VMFB."""
    return [CodeObject(b"\0", kernel.tuning.num_waves * 64) for kernel in kernels]


def text_of(spec: ModelSpec, options: BuildOptions) -> str:
    return ModelModule(spec, options, resolve_target(options.device), no_code).text()
