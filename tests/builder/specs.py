"""Variants of a model: other fields of its spec and its blocks, or other blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import cycle, islice
from typing import Any

from shortfin_apps.llm.model.attention import Attend, Attention
from shortfin_apps.llm.model.block import Block
from shortfin_apps.llm.model.config import pool_elements
from shortfin_apps.llm.model.delta_net import DeltaNet
from shortfin_apps.llm.model.feed_forward import MLP, MoE
from shortfin_apps.llm.model.kv_layout import KeysValues
from shortfin_apps.llm.model.latent_attention import LatentAttention
from shortfin_apps.llm.model.rope import Rope
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec

Fields = Mapping[str, Any]


def changed(
    spec: ModelSpec, *changes: Fields, layers: int | None = None, at: Mapping[int, Fields] | None = None
) -> ModelSpec:
    """The spec with fields changed: its own, and the ones of every block that has a field of that name.

    It gets another number of `layers`; `at` changes single ones further.
    """
    merged = {name: value for each in changes for name, value in each.items()}
    parts: list[ModelSpec | Block] = [spec, *spec.blocks]
    known = {field.name for part in parts for field in fields(part)}
    assert merged.keys() <= known, merged.keys() - known
    number = layers or len(spec.layers)
    made = tuple(tuple(_with(block, merged) for block in layer) for layer in spec.layers)
    made = tuple(islice(cycle(made), number))
    for index, its in (at or {}).items():
        made = (*made[:index], tuple(_with(block, its) for block in made[index]), *made[index + 1 :])
    whole: ModelSpec = _with(spec, merged)
    return replace(whole, layers=made)


def with_blocks(spec: ModelSpec, blocks: Mapping[int, Block]) -> ModelSpec:
    """The spec with a block in place of the first (a delta net) or the last one of some layers."""
    layers = list(spec.layers)
    for index, block in blocks.items():
        first, last = layers[index][0], layers[index][-1]
        layers[index] = (block, last) if isinstance(block, DeltaNet) else (first, block)
    return replace(spec, layers=tuple(layers))


def with_key_size(spec: ModelSpec, size: int) -> ModelSpec:
    """The spec with keys of `size` elements: of every head or, in latent attention, of a token."""
    latent = spec.blocks_of(LatentAttention)
    return changed(spec, {"rank": size - latent[0].rotated} if latent else {"head_dim": size})


def with_experts(spec: ModelSpec, experts: MoE) -> ModelSpec:
    """The spec with experts in every layer."""
    return with_blocks(spec, dict.fromkeys(range(len(spec.layers)), experts))


def _with(of: Any, changes: Fields) -> Any:
    own = {field.name for field in fields(of)} & changes.keys()
    return replace(of, **{name: changes[name] for name in own})


def ffn_features(spec: ModelSpec) -> int:
    """The features of the model's feed-forwards."""
    return spec.blocks_of(MLP)[0].features


def page_elements(spec: ModelSpec, options: BuildOptions) -> int:
    """The elements of a page of all layers together."""
    return sum(pool_elements(spec, options).values())


def rope_of(spec: ModelSpec) -> Rope:
    """The rotation of the layers without a window, or of all layers."""
    ropes = [rotation.rope for rotation in spec.rotations]
    assert ropes[0] is not None
    return ropes[0]


def windows_of(spec: ModelSpec) -> list[int | None]:
    """The window of every layer."""
    return [block.window for layer in spec.layers for block in layer if isinstance(block, Attention)]


def attentions_of(spec: ModelSpec) -> list[Attention]:
    """The attention of every layer."""
    return [block for layer in spec.layers for block in layer if isinstance(block, Attention)]


def layouts_of(spec: ModelSpec) -> list[KeysValues]:
    """Of every layer with attention, the layout of the keys and values that it reads."""
    kinds = (layer[0] for layer in spec.layers)
    read = (block.read_layout if isinstance(block, Attention) else block.kv_layout for block in kinds)
    return [layout for layout in read if isinstance(layout, KeysValues)]


def sinks_of(spec: ModelSpec, layer: int) -> str | None:
    """The name of a layer's sinks."""
    return attend_of(spec, layer).sinks


def attend_of(spec: ModelSpec, layer: int) -> Attend:
    """The layer's attention, from the value `qkv` to `attended`."""
    found = (each for each in spec.operations() if isinstance(each, Attend))
    return next(each for each in found if each.layer == layer)
