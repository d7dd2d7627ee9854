"""Compiles small models with random weights and calls their entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import iree.runtime as iree
import ml_dtypes
import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.builder.program.module import ModelModule
from shortfin_apps.llm.builder.quantise import quantise_rows
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.builder.weights.layout import (
    Int8Panels,
    RowMajor,
    WeightLayout,
    cast_floats,
    stored_types,
)
from shortfin_apps.llm.components.invocation.invoker import Invoker
from shortfin_apps.llm.components.runtime.device import Device, DeviceBuffer, Program
from shortfin_apps.llm.contract.abi import GIVEN, NO_HIDDEN, SamplingField
from shortfin_apps.llm.model.attention import Attention, QueryScaling
from shortfin_apps.llm.model.config import pool_elements, window_of
from shortfin_apps.llm.model.delta_net import DeltaNet
from shortfin_apps.llm.model.dual_experts import DualExperts
from shortfin_apps.llm.model.eagle_head import HEAD_ROWS, EagleHead
from shortfin_apps.llm.model.expert_scores import ExpertScores
from shortfin_apps.llm.model.feed_forward import MLP, MoE
from shortfin_apps.llm.model.latent_attention import LatentAttention
from shortfin_apps.llm.model.layer_inputs import LayerInput, LayerInputs
from shortfin_apps.llm.model.layer_scale import LayerScale
from shortfin_apps.llm.model.rope import LinearScaling, ProportionalScaling, Rope, YarnScaling
from shortfin_apps.llm.model.shared_attention import SharedAttention
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, weight_shapes
from tests.builder.random_blocks import random_blocks
from tests.builder.specs import changed, with_blocks
from tests.compiled_programs import compile_program
from tests.kernel_families import note_executed

DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
ALL_DTYPES = {**DTYPES, "i8": np.dtype(np.int8), "i32": np.dtype(np.int32), "i64": np.dtype(np.int64)}
HOST = resolve_target("cpu")
# This CPU as if it were a GPU: it gets the generic form.
GENERIC = replace(HOST, device="generic")
PAGES = 40
HIDDEN_ROWS = 17
NAN_BYTE = 0xFF  # NaN, whichever float type is made of it

Array = npt.NDArray[Any]

TINY = ModelSpec(
    name="tiny",
    architecture="llama",
    vocab_size=512,
    hidden_size=64,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    layers=2 * ((Attention(heads=4, kv_heads=2, head_dim=16, rope=Rope()), MLP(features=128)),),
    tie_word_embeddings=True,
)
_YARN = YarnScaling(factor=4.0, original_max_position_embeddings=64, attention_factor=1.1)
# With all that a layer may have beside what Llama's has.
FEATURED = changed(
    TINY,
    {"embedding_scale": 2.0},
    {"bias": True, "output_bias": True, "qk_norm": True, "score_scale": 0.5},
    {"rope": Rope(dim=12, scaling=_YARN)},
    at={1: {"rope": None}},
)
# With norms behind attention and feed-forward alone, and of q and k as a whole.
NORMED_AFTER = changed(TINY, {"norm_before": False, "norm_after": True, "whole_qk_norm": True})
# With norms on both sides, gelu, a window in one layer, which rotates by a base of its own, and caps.
WINDOWED = changed(
    TINY,
    {"norm_after": True, "qk_norm": True, "activation": "gelu", "cap": 4.0, "logit_cap": 6.0},
    {"rope": Rope(scaling=LinearScaling(factor=2.0))},
    at={0: {"window": 37, "rope": Rope(theta=100.0, name="local")}},
)
# With queries that are scaled by position, and biases in the feed-forward.
SCALED = changed(TINY, {"query_scaling": QueryScaling(beta=0.3, period=20), "biases": True})
# With other heads in the layer without a window, where v is k, and with a scalar after each layer.
_OTHER_HEADS = changed(
    TINY,
    {"norm_after": True, "qk_norm": True, "value_norm": True},
    at={
        0: {"window": 37, "rope": Rope(theta=100.0, name="local")},
        1: {
            "head_dim": 32,
            "kv_heads": 1,
            "keys_as_values": True,
            "rope": Rope(scaling=ProportionalScaling(kept=4)),
        },
    },
)
OTHER_HEADS = replace(_OTHER_HEADS, layers=tuple((*layer, LayerScale()) for layer in _OTHER_HEADS.layers))
OTHERS = {"featured": FEATURED, "normed-after": NORMED_AFTER, "windowed": WINDOWED, "scaled": SCALED}
_INPUTS = LayerInputs(layers=4, features=32)


def _sharing(spec: ModelSpec) -> ModelSpec:
    """Its layers twice, first to share keys and values, then with these; with an input for each layer."""
    layers = []
    for number in range(_INPUTS.layers):
        attention, mlp, scale = spec.layers[number % 2]
        assert isinstance(attention, Attention)
        own = {each.name: getattr(attention, each.name) for each in fields(attention)}
        first = replace(attention, is_shared=True)
        if number >= 2:
            first = SharedAttention(**own, source=number - 2)
        layers.append((first, mlp, LayerInput(features=_INPUTS.features), scale))
    return replace(spec, layers=tuple(layers), layer_inputs=_INPUTS)


OTHERS |= {"other-heads": OTHER_HEADS, "sharing": _sharing(OTHER_HEADS)}
_DUAL = DualExperts(dense=96, count=7, per_token=3, features=64, activation="gelu")
# With experts next to a feed-forward in the second layer.
DUAL = with_blocks(TINY, {1: _DUAL})
OTHERS |= {"dual": DUAL}
_LATENT = LatentAttention(
    heads=4, rank=20, plain=10, rotated=6, value_dim=16, rope=Rope(scaling=_YARN), score_scale=1.3
)
_SCORES = ExpertScores(is_sigmoid=True, bias=True, groups=4, kept_groups=2, summed=2)
# With latent attention, where q has a compressed form in the second layer, and experts in groups.
LATENT = replace(
    TINY,
    layers=(
        (_LATENT, MLP(features=128)),
        (
            replace(_LATENT, query_rank=32),
            MoE(count=12, per_token=3, features=96, scores=_SCORES, scale=2.5, shared=64, gates_shared=False),
        ),
    ),
)
OTHERS |= {"latent": LATENT}
_EXPERTS = MoE(count=7, per_token=3, features=96, biases=True)
# With experts, which have biases, in the second of three layers only; with sinks, and a window in one layer.
ROUTED = with_blocks(
    changed(TINY, {"vocab_size": 523, "qk_norm": True, "sinks": True}, layers=3, at={1: {"window": 37}}),
    {1: _EXPERTS},
)
# With states in the first and the last of three layers, and gates of attention's result.
_DELTA_NET = DeltaNet(key_heads=2, value_heads=6, key_dim=12, value_dim=16)
HYBRID = with_blocks(
    changed(TINY, {"architecture": "qwen35", "qk_norm": True, "gate": True, "rope": Rope(dim=4)}, layers=3),
    {0: _DELTA_NET, 2: _DELTA_NET},
)


@dataclass(frozen=True)
class Result:
    """An entry's results, without the dimension of 1."""

    values: Array  # [rows, k]
    indices: Array  # [rows, k]
    logits: Array  # [rows, vocab]


@dataclass(frozen=True)
class Draft(Result):
    token_ids: Array  # [rows]
    positions: Array  # [rows], as they are afterwards
    last_tokens: Array


@dataclass
class CompiledModel:
    """A loaded program over one page table of PAGES pages, NaN at first, and the weights as f32.

    Layers with windows or states have the pages of the same ids in a slab of their own, but for those that no
    token of an invocation sees: they are named as a page of NaN.
    """

    spec: ModelSpec
    options: BuildOptions
    weights: dict[str, npt.NDArray[np.float32]]
    device: Device
    program: Program
    invoker: Invoker = field(init=False)
    cache: DeviceBuffer = field(init=False)
    window_cache: list[DeviceBuffer] = field(init=False, default_factory=list)  # or none
    # Rows of hidden states that the next invocation reads and writes, by row of the batch (default: none).
    hidden_from: Sequence[int] = ()
    hidden_to: Sequence[int] = ()
    hidden: DeviceBuffer = field(init=False)

    def __post_init__(self) -> None:
        table = np.full((HIDDEN_ROWS, self.spec.hidden_size), np.nan, np.float32)
        self.hidden = self.device.upload(table)
        self.invoker = Invoker(self.device, self.program)
        self.fill_cache(NAN_BYTE)

    @classmethod
    def build(
        cls,
        spec: ModelSpec,
        options: BuildOptions,
        device: Device,
        folder: Path,
        target: Target = HOST,
        weights: Mapping[str, npt.NDArray[np.float32]] | None = None,
    ) -> CompiledModel:
        """With random weights unless they are given."""
        stored, known = store(weights or random_weights(spec), spec, options, target)
        write_parameters(stored, folder / "model.irpa")
        text = ModelModule(spec, options, target).text()
        vmfb = compile_program(text, target)
        program = device.load_program(vmfb, [folder / "model.irpa"], "module")
        note_executed(text, target.architecture)
        return cls(spec, options, known, device, program)

    def fill_cache(self, byte: int) -> None:
        """Makes a new page table whose every byte is `byte`."""
        kv = ALL_DTYPES[self.options.cache_dtype]
        first, *others = [
            np.full((PAGES, elements * kv.itemsize), byte, np.uint8)
            for elements in pool_elements(self.spec, self.options).values()
        ]
        self.set_cache(first.view(kv), *(each.view(kv) for each in others))

    def set_cache(self, first: Array, *others: Array) -> None:
        """Takes the content [pages, elements] of each slab. That of windows gets a page of NaN behind it."""
        self.cache = self.device.upload(first)
        self.window_cache = [self.device.upload(_with_page_of_nan(each)) for each in others]

    def read_cache(self) -> npt.NDArray[np.uint8]:
        """[PAGES, bytes of a page in all slabs]."""
        slabs = [self.device.download(slab).view(np.uint8) for slab in (self.cache, *self.window_cache)]
        return np.concatenate([slab[:PAGES] for slab in slabs], axis=1)

    def tables(self, starts: Array, blocks: Array) -> list[Array]:
        """The block table, and that of windows if there is one."""
        if not self.window_cache:
            return [blocks]
        window, stride = window_of(self.spec), self.options.block_seq_stride
        assert window is not None
        first_seen = np.maximum(0, np.asarray(starts) - window + 1) // stride
        is_hidden = np.arange(np.shape(blocks)[1]) < first_seen[:, None]
        [window_cache] = self.window_cache
        return [blocks, np.where(is_hidden, window_cache.shape[0] - 1, blocks)]

    def prefill(self, entry: str, tokens: Array, starts: Array, seq_lens: Array, blocks: Array) -> Result:
        return self._call(entry, tokens, starts, seq_lens, *self.tables(starts, blocks))

    def decode(self, entry: str, tokens: Array, starts: Array, blocks: Array) -> Result:
        return self._call(entry, tokens, np.asarray(starts) + 1, starts, *self.tables(starts, blocks))

    def extend(
        self,
        entry: str,
        tokens: Array,
        offsets: Array,
        starts: Array,
        seq_lens: Array,
        blocks: Array,
        last_tokens: Sequence[int] | Array = (0,),
        *,
        followers: Array | None = None,
        window_blocks: Array | None = None,
    ) -> Result:
        tables = self.tables(starts, blocks) if window_blocks is None else [blocks, window_blocks]
        if self.program.entries[entry].takes_followers:
            tables.append(np.zeros(len(starts)) if followers is None else followers)
        return self._call(entry, tokens, offsets, starts, seq_lens, *tables, np.asarray(last_tokens))

    def draft(self, entry: str, blocks: Array, **of_rows: Sequence[int] | Array) -> Draft:
        """Runs a round: arguments by name, [rows] i64 each but for `last_tokens`, are padded."""
        rows = len(blocks)
        padding = {"tokens": 0, "slots": -1, "positions": -1, "checked": GIVEN, "hidden_from": NO_HIDDEN}
        arguments = {name: np.full(rows, value, np.int64) for name, value in padding.items()}
        for name, values in of_rows.items():
            if name in arguments:
                arguments[name][: len(values)] = values
        greedy = np.zeros((len(SamplingField), rows), np.int64)
        greedy[SamplingField.TOP_K] = 1
        tables = self.tables(arguments["positions"], blocks)
        given: list[Any] = [arguments[name] for name in ("tokens", "slots", "positions", "checked")]
        given += [*tables, greedy, np.asarray(of_rows["last_tokens"]), arguments["hidden_from"]]
        buffers = [self.device.upload(np.asarray(each, np.int64)) for each in given]
        pages = [self.cache, *self.window_cache]
        token_ids, *left = self.invoker.submit(entry, [*buffers, self.hidden, *pages]).wait()
        values, indices, logits = (self.device.download(each)[:, 0] for each in left)
        places = buffers[5 + len(tables)]
        tokens, positions, table = (self.device.download(each) for each in (token_ids, buffers[2], places))
        return Draft(values, indices, logits, tokens, positions, table)

    def _call(self, entry: str, *arguments: Array) -> Result:
        buffers = [self.device.upload(np.asarray(a, np.int64)) for a in arguments]
        if self.program.entries[entry].takes_hidden:
            for rows in (self.hidden_from, self.hidden_to):
                named = np.zeros(len(arguments[1]), np.int64)  # one of those with a value per row
                named[: len(rows)] = rows
                buffers.append(self.device.upload(named))
            buffers.append(self.hidden)
        results = self.invoker.submit(entry, [*buffers, self.cache, *self.window_cache]).wait()
        values, indices, logits = (self.device.download(r)[:, 0] for r in results)
        return Result(values, indices, logits)


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Seeded weights, scaled so that activations and logits stay near 1."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(spec).items():
        values = rng.standard_normal(shape) * shape[-1] ** -0.5
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * rng.standard_normal(shape)
        if name.endswith(HEAD_ROWS):
            assert isinstance(spec.draft, EagleHead)
            values = np.full(shape, -1.0)
            count = spec.draft.head_rows or 0
            values[np.sort(rng.permutation(spec.vocab_size)[:count])] = np.arange(count)
        weights[name] = values.astype(np.float32)
    for number, block in enumerate(layer[0] for layer in spec.layers):
        if isinstance(block, SharedAttention):  # which stacks a norm of another layer
            norm, dim = "blk.{}.attn_qk_norm.weight", block.head_dim
            weights[norm.format(number)][dim:] = weights[norm.format(block.source)][dim:]
    return weights


def store(
    weights: Mapping[str, npt.NDArray[np.float32]], spec: ModelSpec, options: BuildOptions, target: Target
) -> tuple[dict[str, Array], dict[str, npt.NDArray[np.float32]]]:
    """Parameters by name, and what the weights are worth once they are stored."""
    parameters: dict[str, Array] = {}
    known = {}
    for name, value in weights.items():
        layout = weight_layout(name, spec, options, target)
        matrices = list(value) if value.ndim == 3 else [value]
        stored = [_store(each, layout, options) for each in matrices]
        worth = [each for _, each in stored]
        known[name] = np.stack(worth) if value.ndim == 3 else worth[0]
        arrays = [np.concatenate(arrays) for arrays in zip(*(each for each, _ in stored), strict=True)]
        parameters |= zip(stored_types(layout, name, value.shape), arrays, strict=True)
    return parameters, known


def _store(
    value: npt.NDArray[np.float32], layout: WeightLayout, options: BuildOptions
) -> tuple[list[Array], npt.NDArray[np.float32]]:
    if isinstance(layout, Int8Panels):
        quants, scales = quantise_rows(value)
        return layout.store(value), quants * scales[:, None]
    if layout.blocks is not None:
        blocks = random_blocks(value, layout.blocks)
        return layout.store(blocks), blocks.dequantise()
    dtype = layout.dtype if isinstance(layout, RowMajor) else options.activations
    return layout.store(value), cast_floats(value, dtype).astype(np.float32)


def write_parameters(weights: Mapping[str, Array], path: Path) -> None:
    index = iree.ParameterIndex()
    for name, array in weights.items():
        index.add_buffer(name, np.ascontiguousarray(array).view(np.uint8).reshape(-1))
    index.create_archive_file(str(path))


def block_table(
    rng: np.random.Generator, pages_per_row: Sequence[int], width: int, pages: int = PAGES
) -> npt.NDArray[np.int64]:
    """[rows, width]: distinct pages in no order, 0 where a row has none."""
    free = iter(rng.permutation(np.arange(1, pages)))
    table = np.zeros((len(pages_per_row), width), np.int64)
    for row, count in enumerate(pages_per_row):
        table[row, :count] = [next(free) for _ in range(count)]
    return table


def _with_page_of_nan(pages: Array) -> Array:
    """[pages, elements] and one page more."""
    as_bytes = np.ascontiguousarray(pages).view(np.uint8)
    padded: Array = np.pad(as_bytes, ((0, 1), (0, 0)), constant_values=NAN_BYTE).view(pages.dtype)
    return padded
