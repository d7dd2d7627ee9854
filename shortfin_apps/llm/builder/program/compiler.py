"""Compile a model's graph to a VMFB with the IREE compiler."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from iree.compiler import version
from iree.compiler.tools.binaries import find_tool

from shortfin_apps.llm.builder.kernels.ahead_of_time.compile_all import ParallelCompiler
from shortfin_apps.llm.builder.program.module import ModelModule
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.builder.weights.parameters import parameter_types
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec

__all__ = ["CompileResult", "compile_model", "parameter_types"]

# With heads of 16 or 32 elements, the attention of fixed-size entries (`--extend-sizes`) sends LLVM's load
# and store vectorizer into an endless loop, at least in IREE 3.9 for gfx942.
_SMALLEST_SOUND_HEAD = 64
_NO_VECTORIZED_LOADS = "--amdgpu-load-store-vectorizer=0"


@dataclass(frozen=True, slots=True)
class CompileResult:
    """The result of a compilation.

    `entries`: entry names without the `$async` suffix. `kernels`: a line per kind of operation, with the
    chosen kernel and the reason.
    """

    compiler_version: str
    flags: tuple[str, ...]
    target: Target
    entries: tuple[str, ...]
    kernels: tuple[str, ...]


def compile_model(
    spec: ModelSpec,
    options: BuildOptions,
    out: Path,
    kernel_cache: Path,
    on_progress: Callable[[str], None] | None = None,
) -> CompileResult:
    """Compile `spec` and write the VMFB to `out`, completely or not at all.

    Triton kernels that the folder `kernel_cache` lacks are compiled in parallel processes, and added to it.

    The module reads the parameters that `parameter_types` lists, in scope `model`. Raises BuildError if the
    target is unknown or the compiler fails, OSError if the disk is full. An interrupt stops the compiler and
    the processes, and leaves no files except finished kernels.
    """
    report = on_progress or (lambda _: None)
    target = resolve_target(options.device)
    report("writing the graph")
    module = ModelModule(spec, options, target, ParallelCompiler(kernel_cache, report))
    entries = tuple(entry.name for entry in module.entries)
    text = module.text()
    report(f"compiling {len(entries)} entries for {target.cpu}")
    flags = _flags_for(spec, options, target)
    compile_text(text, flags, out)
    return CompileResult(version.VERSION, flags, target, entries, tuple(map(str, module.choices)))


def _flags_for(spec: ModelSpec, options: BuildOptions, target: Target) -> tuple[str, ...]:
    dims = [each.head_dim for each in spec.blocks_of(Attention)]
    is_endless = min(dims, default=_SMALLEST_SOUND_HEAD) < _SMALLEST_SOUND_HEAD and options.extend_sizes
    if target.architecture == "amdgpu" and is_endless:
        return (*target.flags, _NO_VECTORIZED_LOADS)
    return target.flags


def compile_text(text: str, flags: tuple[str, ...], out: Path) -> None:
    """Compile the MLIR `text` to a VMFB at `out`, through a temporary folder next to `out`.

    Only the input module is verified. Verification between passes takes up to a third of the compile time
    and does not change the program.
    """
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        source, made = Path(folder, "model.mlir"), Path(folder, "model.vmfb")
        source.write_text(text, encoding="utf-8")
        # subprocess.run kills the compiler when an exception such as an interrupt passes through it.
        run = subprocess.run(
            [find_tool("iree-compile"), str(source), "-o", str(made), "--verify=false", *flags],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise _failure(run)
        made.replace(out)


def _failure(run: subprocess.CompletedProcess[str]) -> Exception:
    if run.returncode < 0:
        by = signal.Signals(-run.returncode).name
        return BuildError(f"the compiler was stopped by {by}; is there enough memory?")
    if os.strerror(errno.ENOSPC) in run.stderr:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = run.stderr.splitlines()
    error = next((line for line in lines if "error:" in line.lower()), f"exit {run.returncode}")
    return BuildError(f"the compiler failed: {error}")
