"""A stand-in for the compiler, for tests of the files of an artefact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shortfin_apps.llm.builder.program.compiler import CompileResult
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec


@dataclass
class FakeCompiler:
    """Keeps the devices that it compiled for; raises `fail` at the device `fail_for`."""

    devices: list[str] = field(default_factory=list)
    fail_for: str | None = None
    fail: BaseException = field(default_factory=KeyboardInterrupt)

    def compile_model(
        self,
        spec: ModelSpec,
        options: BuildOptions,
        out: Path,
        kernel_cache: Path,
        on_progress: Callable[[str], None] | None = None,
    ) -> CompileResult:
        self.devices.append(options.device)
        target = resolve_target(options.device)
        out.write_bytes(f"program for {target.cpu}".encode())
        if options.device == self.fail_for:
            raise self.fail
        return CompileResult("3.9", ("--flag", target.cpu), target, ("decode_bs1",), (f"Norm: {target.cpu}",))
