"""Build options that keep the types of a source's weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shortfin_apps.llm.builder.sources.base import ModelSource
from shortfin_apps.llm.builder.weights.chosen_layout import made_blocks
from shortfin_apps.llm.model.spec import BuildOptions, weight_parts
from shortfin_apps.llm.model.weight_blocks import Q8_0, BlockType, common_type


def with_own_types(source: ModelSource, options: BuildOptions) -> BuildOptions:
    """Return `options` with the types of the source's weights: its own blocks, or bf16 for floats.

    A weight stacked from several tensors gets a block type that preserves the blocks of each tensor.
    """
    quantisation = source.quantisation
    if quantisation is None:
        return replace(options, weights="bf16", block_types=())
    others = {
        name: kind for name, kind in _own_blocks(source) if kind != made_blocks(name, quantisation.weights)
    }
    return replace(options, weights=quantisation.weights, block_types=tuple(others.items()))


def _own_blocks(source: ModelSource) -> Iterator[tuple[str, BlockType | None]]:
    for name, parts in weight_parts(source.spec.tensors()).items():
        if len(parts[0].shape) > 1 and parts[0].stored == "weights":
            yield name, _stacked([source.block_type(part.name) for part in parts], name)


def _stacked(types: list[BlockType | None], name: str) -> BlockType | None:
    """Return the block type of a weight stacked from tensors of `types`; None only if all are floats."""
    if not any(types):
        return None
    kind = common_type([each or Q8_0 for each in types])
    # The embedding lookup reads single elements, which must be whole bytes.
    return replace(kind, bits=8, is_e2m1=False) if name.endswith("token_embd.weight") else kind
