"""Create the kernel of a decode as one launch, from the kernels that are otherwise separate launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from shortfin_apps.llm.builder.graph.batch import Slab
from shortfin_apps.llm.builder.graph.emitter import Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Constexpr, Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Buffer, Interface, Regions, buffer
from shortfin_apps.llm.builder.kernels.triton import FP8_GROUP, GROUP
from shortfin_apps.llm.builder.kernels.triton.one_launch import decode_layers, store_addresses
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext
from shortfin_apps.llm.builder.lowering.triton.attention_kernels import AttentionKernels
from shortfin_apps.llm.builder.lowering.triton.matmul import (
    MATRIX,
    MatmulKernels,
    block_constants,
    deferred,
    matrix,
)
from shortfin_apps.llm.builder.lowering.triton.tiles import (
    OneLaunchTiles,
    one_launch_tiles,
    power_of_two,
    tiles_of,
)
from shortfin_apps.llm.builder.weights.layout import FLOAT_DTYPES, Fp8Rows, WeightLayout
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.operations import Activation

MATRICES = ("qkv", "output", "gate_up", "down")
# The columns of the table of addresses, as in kernels/triton/one_launch.py. A matrix has one for each of
# MATRIX.
_VECTORS = ("attention_norm", "bias", "head_norm", "sinks", "ffn_norm")
COLUMNS = {
    **{name: column for column, name in enumerate(_VECTORS)},
    **{name: len(_VECTORS) + number * len(MATRIX) for number, name in enumerate(MATRICES)},
}
EMBEDDING = ("embedding", "embedding_scales", "embedding_minima")
NUM_COLUMNS = len(_VECTORS) + len(MATRICES) * len(MATRIX)

# Two workgroups share a compute unit if a matmul has more output features than this, and heads are no larger.
MOST_FEATURES_ALONE = 4224  # 32 for each multiprocessor of an H200
MOST_SHARING_HEAD, MOST_SHARING_WHOLE_HEAD = 128, 64

_LINE = 128  # bytes
_ITEM_BYTES: dict[str, int] = {"i8": 1, **{name: dtype.itemsize for name, dtype in FLOAT_DTYPES.items()}}


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that qualifies; `weights`: names by field of the table of addresses."""

    block: Attention
    activation: Activation
    weights: dict[str, str]


@dataclass(frozen=True, slots=True)
class Decode:
    """The operations of a decode that qualifies."""

    embedding: str
    layers: tuple[Layer, ...]
    norm: str
    head: str

    @property
    def rows_of_table(self) -> list[dict[str, str]]:
        """The weights by field, for each row of the table of addresses."""
        return [*(layer.weights for layer in self.layers), {"attention_norm": self.norm, "qkv": self.head}]


class OneLaunchKernels:
    """Creates the kernel of a decode as one launch."""

    def __init__(self, context: LoweringContext, *, defers_norms: bool) -> None:
        self._defers_norms = defers_norms
        self._spec = context.spec
        self._options = context.options
        self._act = context.options.activations
        self._weights = context.weights
        self._target = context.target
        self._attention_tiles = tiles_of(context.target)

    def decode_layers(self, decode: Decode, rows: int, slab: Slab) -> tuple[Kernel, int]:
        """Return the kernel for `rows` batch rows of one token each, and how many compute units it needs."""
        layer, spec = decode.layers[0], self._spec
        tiles = one_launch_tiles(self._target, per_unit=2 if self._share_units(layer) else 1)
        attention = self._attention(layer.block, rows, slab)
        matmuls = self._matmuls_of(decode, rows, slab, tiles)
        work = self._work(layer, rows, attention)
        reads = self._reads(decode, rows, attention)
        programs = min(tiles.programs, max(map(_items, (attention, *matmuls.values()))))
        kernel = Kernel(
            name=f"decode_layers_{rows}",
            function=decode_layers,
            interface=Interface(
                constants=("width",),
                reads=reads,
                writes=self._writes(rows, attention, work),
            ),
            constexprs={
                "PROGRAMS": programs,
                "TOKENS": rows,
                "LAYERS": len(decode.layers),
                "HIDDEN": spec.hidden_size,
                "VOCAB": spec.vocab_size,
                "FFN": self._features(layer, "gate_up") // 2,
                "BLOCK": power_of_two(spec.hidden_size),
                "SCALE": spec.embedding_scale,
                "EPS": spec.rms_norm_eps,
                "GROUP": GROUP,
                "ACTIVATION": layer.activation,
                **{f"HAS_{name.upper()}": name in layer.weights for name in ("bias", "head_norm", "sinks")},
                **_attention_constants(attention),
                "FLOAT": self._act,
                "EMBEDDING_BLOCKS": block_constants(self._weights.layout(decode.embedding)),
                **dict.fromkeys(set(EMBEDDING) - reads.keys()),
                **_matmul_constants(matmuls),
                "DEFERS": self._defers_norms,
                **{name.upper(): offset for name, offset in work.offsets.items()},
            },
            grid=[programs],
            tuning=tiles.tuning,
            most_shared_bytes=tiles.most_shared_bytes,
        )
        return kernel, -(-programs // tiles.per_unit)

    def _matmuls_of(self, decode: Decode, rows: int, slab: Slab, tiles: OneLaunchTiles) -> dict[str, Kernel]:
        """Return the matmuls as separate kernels, by the names of their weights."""
        layer = decode.layers[0]
        matmuls = MatmulKernels(self._spec, self._options, tiles.matmul, tiles.loaded_bytes)

        def stored(weight: str) -> tuple[tuple[int, ...], int, WeightLayout]:
            return self._weights.shape(weight), rows, self._weights.layout(weight)

        shape, _, layout = stored(layer.weights["qkv"])
        return {
            "qkv": matmuls.project_qkv(layer.block, shape, rows, slab, layout),
            "output": matmuls.linear(*stored(layer.weights["output"])),
            "gate_up": matmuls.gated_linear(layer.activation, *stored(layer.weights["gate_up"])),
            "down": matmuls.linear(*stored(layer.weights["down"])),
            "head": matmuls.linear(*stored(decode.head)),
        }

    def _attention(self, block: Attention, rows: int, slab: Slab) -> Kernel:
        """Return the separate kernel of attention, for a known number of rows and the longest context."""
        kernels = AttentionKernels(self._spec, block, self._options, self._attention_tiles)
        return replace(kernels.attend_singles(slab), grid=[rows, block.kv_heads, kernels.splits])

    def _features(self, layer: Layer, field: str) -> int:
        return self._weights.shape(layer.weights[field])[0]

    def _share_units(self, layer: Layer) -> bool:
        """Whether two workgroups should share a compute unit.

        On an H200, that was slower with few tiles, weights in blocks, or wide tiles of whole heads.
        """
        block, options = layer.block, self._options
        most = MOST_SHARING_WHOLE_HEAD if block.qk_norm or options.kv == "q8_0" else MOST_SHARING_HEAD
        if self._weights.layout(layer.weights["gate_up"]).blocks or block.head_dim > most:
            return False
        return max(self._features(layer, name) for name in MATRICES) > MOST_FEATURES_ALONE

    def _reads(self, decode: Decode, rows: int, attention: Kernel) -> dict[str, Buffer]:
        of_attention = _of_rows(attention.interface.reads, rows)
        embedding = matrix(self._weights.layout(decode.embedding), self._weights.shape(decode.embedding))
        return {
            "ids": buffer("i64", rows),
            **dict(zip(EMBEDDING, embedding.values(), strict=False)),
            "weights": buffer("i64", len(decode.layers) + 1, NUM_COLUMNS),
            "rotary": buffer("f32", rows, 2, decode.layers[0].block.head_dim // 2),
            "slots": buffer("i64", rows),
            **{name: of_attention[name] for name in ("starts", "seq_lens", "blocks")},
        }

    def _writes(self, rows: int, attention: Kernel, work: Regions) -> dict[str, Buffer]:
        of_attention = _of_rows(attention.interface.writes, rows)
        return {
            "cache": attention.interface.reads["cache"],
            "counters": of_attention["counters"],
            "barrier": buffer("i32", 1),
            "logits": buffer("f32", rows, self._spec.vocab_size),
            "work": buffer("i8", work.bytes),
        }

    def _work(self, layer: Layer, rows: int, attention: Kernel) -> Regions:
        """Return the buffers between stages, in one block: IREE's HIP driver passes at most 16 buffers."""
        hidden = self._spec.hidden_size
        of_attention = _of_rows(attention.interface.buffers, rows)
        most = max(self._weights.shape(layer.weights[name])[1] for name in MATRICES)
        quantised = most if isinstance(self._weights.layout(layer.weights["qkv"]), Fp8Rows) else 0
        buffers = {
            "x": buffer("f32", rows, hidden),
            "y": buffer("f32", rows, hidden),
            **_of_rows(deferred(self._act, hidden), rows),
            "q": of_attention["q"],
            "attended": of_attention["out"],
            "gated": buffer(self._act, rows, self._features(layer, "gate_up") // 2),
            "parts": of_attention["parts"],
            "states": of_attention["states"],
            "quants": buffer("i8", rows, quantised),
            "quant_scales": buffer("f32", rows, -(-quantised // FP8_GROUP)),
        }
        return Regions({name: _aligned_bytes(each) for name, each in buffers.items()})


def address_kernel(weight: Mapping[str, Tensor], shape: tuple[int, int]) -> Kernel:
    """Return the kernel that stores the addresses of a weight's parameters, by MATRIX, in the table."""
    return Kernel(
        name="_".join(["store_addresses", *(each.dtype for each in weight.values())]),
        function=store_addresses,
        interface=Interface(
            constants=("at",),
            reads={name: buffer(each.dtype) for name, each in weight.items()},
            writes={"table": buffer("i64", *shape)},
        ),
        constexprs=dict.fromkeys(set(MATRIX) - weight.keys()),
        grid=[1],
        tuning=Tuning(num_waves=1),
    )


def _items(separate: Kernel) -> int:
    """Return the number of workgroups that the separate kernel has for at most 16 rows."""
    return prod(1 if isinstance(each, Tiles) else each for each in separate.grid)


def _aligned_bytes(of: Buffer) -> int:
    """Return the bytes of a buffer, rounded up to lines of the cache."""
    elements = prod(int(size) for size in of.shape)
    return -(-elements * _ITEM_BYTES[of.dtype] // _LINE) * _LINE


def _of_rows(buffers: Mapping[str, Buffer], rows: int) -> dict[str, Buffer]:
    """Return the buffers for a known number of batch rows, each of one token."""
    return {
        name: buffer(each.dtype, *(rows if size in ("rows", "tokens") else size for size in each.shape))
        for name, each in buffers.items()
    }


def _attention_constants(attention: Kernel) -> dict[str, Constexpr]:
    """Return the constants of `attend_singles`, of which COLUMNS is SLOTS in the one kernel."""
    left_out = {"sinks", "TAIL", "BLOCK_TAIL"}
    constants = {name: value for name, value in attention.constexprs.items() if name not in left_out}
    return {"SLOTS": constants.pop("COLUMNS"), "STAGES": attention.tuning.num_stages, **constants}


def _matmul_constants(matmuls: Mapping[str, Kernel]) -> dict[str, Constexpr]:
    """Return the tile and the layout of each matmul's weight, and what is common to all matmuls."""
    common = {name: matmuls["qkv"].constexprs[name] for name in ("HEAD_COLUMNS", "EARLY")}
    tiles = {f"{name.upper()}_TILE": _tile_of(each) for name, each in matmuls.items()}
    return {
        **common,
        **tiles,
        **{f"{name.upper()}_LAYOUT": _layout_of(each) for name, each in matmuls.items()},
    }


def _tile_of(matmul: Kernel) -> tuple[int, ...]:
    sizes = [matmul.constexprs[name] for name in ("COLUMNS", "DEPTH", "ROWS", "PARTS")]
    return (*(size for size in sizes if isinstance(size, int)), matmul.tuning.num_stages)


def _layout_of(matmul: Kernel) -> tuple[int, ...] | str | None:
    """Return the constant LAYOUT of kernels/triton/one_launch.py for the weight."""
    blocks = matmul.constexprs["BLOCKS"]
    if "x_scales" in matmul.interface.reads:
        return matmul.interface.reads["w"].dtype
    if not isinstance(blocks, tuple):
        return None
    return sum(name in matmul.interface.reads for name in MATRIX), *blocks
