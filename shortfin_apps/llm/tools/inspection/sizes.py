"""The sizes of a model: its program, its parameters by type, and its KV cache."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from shortfin_apps.llm.artifact.artifact import Manifest
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.parameters import parameter_types
from shortfin_apps.llm.components.runtime.parameters import parameter_bytes
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.tools.inspection.subject import Subject


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """The parameters of one type, in MLIR's spelling; None for files without type information."""

    type: str | None
    count: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """The KV cache, over all slabs; `context_tokens` is the maximum per request.

    If some layers see only `window_tokens` and have separate pages, there are fewer of these.
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
    """Returns the parameters by type, the type with the most bytes first. Raises ArtifactError."""
    found = parameter_bytes(subject.parameters)
    types = {} if subject.manifest is None else _types(subject.manifest, len(found))
    sizes: defaultdict[str | None, list[int]] = defaultdict(list)
    for name, size in found.items():
        sizes[types.get(name)].append(size)
    groups = [ParameterGroup(kind, len(each), sum(each)) for kind, each in sizes.items()]
    return tuple(sorted(groups, key=lambda group: -group.bytes))


def _types(manifest: Manifest, num_parameters: int) -> dict[str, str]:
    layers = manifest.spec.num_hidden_layers
    if layers > num_parameters:  # checked first: parameter names are generated for every layer
        raise ArtifactError(
            f"the manifest's model has {layers} layers, but the parameters are {num_parameters}; rebuild "
            "with `shortfin-llm build`"
        )
    record = manifest.target
    features = frozenset(record.features)
    target = Target(record.device, manifest.compile_flags, record.architecture, record.cpu, features)
    stored = parameter_types(manifest.spec, manifest.options, target)
    return {name: dtype for name, (_, dtype) in stored.items()}
