"""The files to inspect: an artefact's directory, or a VMFB with its config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shortfin_apps.llm.artifact.artifact import Artifact, Manifest
from shortfin_apps.llm.contract.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The files to inspect. Loose files have no manifest, and may lack parameters."""

    name: str
    vmfb: Path
    config: ModelConfig
    parameters: tuple[Path, ...] = ()
    manifest: Manifest | None = None


def open_directory(directory: Path, cpu: str | None = None) -> Subject:
    """Opens an artefact for any machine; of several programs, the one for `cpu`, or the first.

    Raises ArtifactError.
    """
    artifact = Artifact.open(directory, for_this_host=False, cpu=cpu)
    return Subject(
        name=artifact.name,
        vmfb=artifact.vmfb,
        config=artifact.config,
        parameters=artifact.parameters,
        manifest=artifact.manifest,
    )


def open_files(vmfb: Path, model_config: Path, parameters: tuple[Path, ...]) -> Subject:
    """Opens files given one by one, as for `serve`. Raises ArtifactError."""
    return Subject(name=vmfb.stem, vmfb=vmfb, config=ModelConfig.load(model_config), parameters=parameters)
