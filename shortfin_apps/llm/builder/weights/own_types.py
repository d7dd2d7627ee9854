"""The types that a source's weights have already, as far as `build` has such."""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.builder.model.family import weight_parts
from shortfin_apps.llm.builder.model.spec import BuildOptions
from shortfin_apps.llm.builder.sources.base import ModelSource


def with_own_types(source: ModelSource, options: BuildOptions) -> BuildOptions:
    """The options for weights as they are in the source: bf16 for floats, else blocks of about as many bits.

    Where most weights have 4 bits, each has 8 of which a part has more.
    """
    quantisation = source.quantisation
    if quantisation is None:
        return replace(options, weights="bf16", finer_weights=())
    finer = () if quantisation.weights != "q4" else _finer_weights(source)
    return replace(options, weights=quantisation.weights, finer_weights=finer)


def _finer_weights(source: ModelSource) -> tuple[str, ...]:
    return tuple(
        name
        for name, parts in weight_parts(source.spec).items()
        if name.startswith("blk.") and len(parts[0].shape) > 1
        if any(source.bits(part.name) != 4 for part in parts)
    )
