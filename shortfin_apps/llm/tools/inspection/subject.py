"""Opens the files to inspect (an artefact's directory, or a VMFB with its config) and sums up their sizes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from shortfin_apps.llm.artifact.artifact import Artifact, Manifest
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.parameters import parameter_types
from shortfin_apps.llm.components.runtime.parameters import parameter_bytes
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The files to inspect. Files given one by one have no manifest, and possibly no parameters.

    `missing_files`: names of the artefact's files that are not there.
    """

    name: str
    vmfb: Path
    config: ModelConfig
    parameters: tuple[Path, ...] = ()
    manifest: Manifest | None = None
    missing_files: tuple[str, ...] = ()


def open_directory(directory: Path, program: str | None = None) -> Subject:
    """Open an artefact, even if this machine cannot run it. Raises ArtifactError.

    `program` names the CPU or chip of one of several programs; by default the first whose files
    are there is opened.
    """
    artifact = Artifact.open(directory, for_this_host=False, name=program)
    return Subject(
        name=artifact.name,
        vmfb=artifact.vmfb,
        config=artifact.config,
        parameters=artifact.parameters,
        manifest=artifact.manifest,
        missing_files=artifact.missing_files,
    )


def open_files(vmfb: Path, model_config: Path, parameters: tuple[Path, ...]) -> Subject:
    """Open files that are not in an artefact's directory. Raises ArtifactError."""
    return Subject(name=vmfb.stem, vmfb=vmfb, config=ModelConfig.load(model_config), parameters=parameters)


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Count and total size of the parameters of one MLIR type; `type` is None if there is no manifest."""

    type: str | None
    count: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """Sizes of the KV cache, summed over all slabs. `context_tokens` is the maximum per request.

    `window_tokens` is set if sliding-window layers have pages of their own, of which there are fewer than
    `pages`.
    """

    type: str
    bytes_per_token: int
    page_tokens: int
    page_bytes: int
    pages: int
    context_tokens: int
    window_tokens: int | None


def cache_sizes(config: ModelConfig) -> CacheSizes:
    page_bytes = sum(config.page_elements) * config.paged_kv_cache.dtype.itemsize
    return CacheSizes(
        type=config.paged_kv_cache.kv_cache_dtype,
        bytes_per_token=page_bytes // config.stride,
        page_tokens=config.stride,
        page_bytes=page_bytes,
        pages=config.paged_kv_cache.device_block_count,
        context_tokens=config.max_seq_len,
        window_tokens=config.window_tokens if config.has_window_table else None,
    )


def parameter_groups(subject: Subject) -> tuple[ParameterGroup, ...]:
    """Return a group per type of parameters, most bytes first. Raises ArtifactError."""
    found = parameter_bytes(subject.parameters)
    types = {} if subject.manifest is None else _types(subject.manifest, len(found))
    sizes: defaultdict[str | None, list[int]] = defaultdict(list)
    for name, size in found.items():
        sizes[types.get(name)].append(size)
    groups = [ParameterGroup(kind, len(each), sum(each)) for kind, each in sizes.items()]
    return tuple(sorted(groups, key=lambda group: -group.bytes))


def _types(manifest: Manifest, num_parameters: int) -> dict[str, str]:
    layers = len(manifest.spec.layers)
    if layers > num_parameters:  # a damaged number of layers would generate too many parameter names below
        raise ArtifactError(
            f"the manifest's model has {layers} layers, but the parameters are {num_parameters}; rebuild "
            "with `shortfin-llm build`"
        )
    record = manifest.program.target
    features = frozenset(record.features)
    target = Target(record.device, manifest.program.compile_flags, record.architecture, record.cpu, features)
    stored = parameter_types(manifest.spec, manifest.options, target)
    return {name: dtype for name, (_, dtype) in stored.items()}
