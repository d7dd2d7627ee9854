"""A peer without a server: its engine runs in the server of `bench/peers/in_process`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.peers.cache import Cache
from bench.peers.kinds import WeightKind
from bench.peers.requirements import Needs, interpreter, program, wheel
from bench.peers.server import Launch
from bench.peers.torch_build import TORCH, remove_unfit
from bench.peers.weights import model_directory

REPOSITORY = Path(__file__).parents[2]
SERVER = ("fastapi", "uvicorn[standard]", "orjson", "tokenizers")
OFFLINE = {"HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class EnginePackage:
    """An engine on PyPI.

    `format_of` returns its name for the weights, None if they are not measured. `convert` returns the command
    that writes a model in that format, given the environment's programs, the Hugging Face directory, the
    output directory and the format.
    """

    label: str
    requirements: tuple[str, ...]
    module: str
    disk_bytes: int
    format_of: Callable[[WeightKind], str | None]
    convert: Callable[[Path, Path, Path, str], list[str | Path]]
    options_of: Callable[[str], tuple[str, ...]] = lambda _: ()

    @property
    def installed(self) -> str:
        return " ".join((*self.requirements, *SERVER))


class InProcessPeer:
    """One server with SmolLM2 for all workloads."""

    def __init__(self, cache: Cache, threads: int, python: str, package: EnginePackage) -> None:
        self.label = package.label
        self._cache = cache
        self._threads = threads
        self._python = python
        self._package = package
        self._bin = cache.bin_of(package.label)
        self._format = ""

    def needs(self, weights: WeightKind) -> Needs:
        del weights
        missing = program("nice", "coreutils")
        if self._cache.is_done(self.label, self._package.installed):
            return Needs(tuple(missing))
        missing += [*interpreter(self._python), *wheel(self._python, *TORCH)]
        return Needs(tuple(missing), self._package.disk_bytes)

    def set_up(self, weights: WeightKind) -> None:
        self._cache.once(self.label, self._package.installed, self._install)
        found = self._package.format_of(weights)
        assert found is not None
        self._format = found
        source = model_directory(self._cache)
        what = f"{found} of {source.name}, by {self._package.installed}"
        self._cache.once(self._model.name, what, lambda: self._convert(source))

    @property
    def _model(self) -> Path:
        return self._cache.root / f"{self.label}-{self._format}"

    def _install(self) -> None:
        requirements = (*self._package.requirements, "==".join(TORCH), *SERVER)
        self._cache.make_virtual_environment(self.label, requirements, self._python)
        remove_unfit(self._cache, self.label)

    def _convert(self, source: Path) -> None:
        """Convert into a temporary directory, which is renamed once it is complete."""
        part = self._model.with_suffix(".part")
        for old in (part, self._model):
            shutil.rmtree(old, ignore_errors=True)
        self._cache.run(self.label, self._package.convert(self._bin, source, part, self._format), OFFLINE)
        part.replace(self._model)

    def launch(self, port: int, clients: int) -> Launch:
        del clients
        command = [str(self._bin / "python"), "-m", self._package.module, str(self._model)]
        command += ["--port", str(port), "--threads", str(self._threads)]
        command += self._package.options_of(self._format)
        return Launch(tuple(command), {"PYTHONPATH": str(REPOSITORY), **OFFLINE})
