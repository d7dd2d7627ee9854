"""Create the kernels of a model's matmuls, with the inputs and outputs of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shortfin_apps.llm.builder.graph.batch import Slab
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Constexpr, Kernel, Tiles
from shortfin_apps.llm.builder.kernels.interface import Buffer, Interface, buffer
from shortfin_apps.llm.builder.kernels.triton import FP8_GROUP, GROUP
from shortfin_apps.llm.builder.kernels.triton.linear import gated_linear, linear
from shortfin_apps.llm.builder.kernels.triton.qkv import project_qkv
from shortfin_apps.llm.builder.lowering.triton.attention_kernels import pages_of
from shortfin_apps.llm.builder.lowering.triton.tiles import LOADED_BYTES, MatmulTile, power_of_two
from shortfin_apps.llm.builder.weights.layout import FLOAT_DTYPES, BlockRows, Fp8Rows, RowMajor, WeightLayout
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.operations import Activation
from shortfin_apps.llm.model.spec import BuildOptions, FloatType, ModelSpec

Shape = tuple[int, ...]  # of a weight: output features, input features
MATRIX = ("w", "scales", "minima")  # the operands of a weight; a float weight has only "w"


class MatmulKernels:
    """Creates the kernels of matmuls.

    `tile_of` returns the tile for a number of tokens and a weight's shape and layout; `loaded_bytes`: shared
    memory for what a tile of whole heads loads ahead. In all methods, `shape` and `layout` are the weight's;
    None for `layout` stands for row-major floats.
    """

    def __init__(
        self,
        spec: ModelSpec,
        options: BuildOptions,
        tile_of: Callable[[Dim, Shape, WeightLayout | None], MatmulTile],
        loaded_bytes: int = LOADED_BYTES,
    ) -> None:
        self._spec = spec
        self._options = options
        self._act = options.activations
        self._tile_of = tile_of
        self._loaded_bytes = loaded_bytes

    def linear(self, shape: Shape, tokens: Dim, layout: WeightLayout | None = None) -> Kernel:
        """Return the kernel of Linear: x times the transpose of w, plus `residual`.

        If the operand `norm` is given, the kernel also writes the inputs of the matmuls after this norm.
        """
        out_features, _ = shape
        tile = self._tile_of(tokens, shape, layout or RowMajor(self._act))
        interface = Interface(
            constants=("tokens",),
            reads={
                **self._reads(shape, layout),
                "residual": buffer("f32", "tokens", out_features),
                "norm": buffer("f32", out_features),
            },
            writes={"y": buffer("f32", "tokens", out_features), **deferred(self._act, out_features)},
        )
        return self._kernel("linear", linear, interface, shape, layout, tile, {"OUT": out_features})

    def gated_linear(
        self, activation: Activation, shape: Shape, tokens: Dim, layout: WeightLayout | None = None
    ) -> Kernel:
        """Return the kernel of GatedLinear: activation(gate) * up; w has the rows of gate, then of up."""
        out_features = shape[0] // 2
        tile = self._tile_of(tokens, shape, layout or RowMajor(self._act))
        interface = Interface(
            constants=("tokens",),
            reads=self._reads(shape, layout),
            writes={"y": buffer(self._act, "tokens", out_features)},
        )
        constexprs = {"OUT": out_features, "ACTIVATION": activation}
        return self._kernel("gated_linear", gated_linear, interface, shape, layout, tile, constexprs)

    def project_qkv(
        self, block: Attention, shape: Shape, tokens: Dim, slab: Slab, layout: WeightLayout | None = None
    ) -> Kernel:
        """Return the kernel that projects to q, k and v, and rotates q and k.

        It returns q in `query_dtype`, and writes k and v to the cache. If heads have a norm, or scales in a
        q8_0 cache, tiles consist of whole heads.
        """
        options = self._options
        has_whole_heads = block.qk_norm or options.kv == "q8_0"
        head_columns = power_of_two(block.head_dim) if has_whole_heads else block.head_dim
        tile = self._tile_of(tokens, shape, layout or RowMajor(self._act))
        wide = self._widened(tile, layout, head_columns if has_whole_heads else 1)
        columns = shape[0] // block.head_dim * head_columns
        interface = Interface(
            constants=("tokens", "layer"),
            reads={
                **self._reads(shape, layout),
                "bias": buffer("f32", shape[0]),
                "head_norm": buffer("f32", 2 * block.head_dim),
                "rotary": buffer("f32", "tokens", 2, block.head_dim // 2),
                "slots": buffer("i64", "tokens"),
            },
            writes={
                "cache": pages_of(slab),
                "q": buffer(options.query_dtype, "tokens", block.q_features),
            },
        )
        heads = {
            "HEADS": block.heads,
            "KV_HEADS": block.kv_heads,
            "HEAD_DIM": block.head_dim,
            "HEAD_COLUMNS": head_columns,
            "STRIDE": options.block_seq_stride,
            "ROW": block.read_layout.row_elements(options.kv),
        }
        # Named by the tile before widening, as different tiles may be equal in size after it.
        kernel = self._kernel(
            f"project_qkv{slab.suffix}", project_qkv, interface, shape, layout, wide, heads, columns
        )
        return replace(kernel, name=kernel.name.replace(wide.suffix, tile.suffix))

    def _widened(self, tile: MatmulTile, layout: WeightLayout | None, least_columns: int) -> MatmulTile:
        """Return the tile with at least `least_columns` columns."""
        if isinstance(layout, Fp8Rows):  # the tile's depth must stay the size of a group with one scale
            return replace(tile, columns=max(tile.columns, least_columns))
        wide = tile.with_columns(least_columns)
        if isinstance(layout, BlockRows):
            return wide.for_wide_blocks() if wide.columns > tile.columns else wide
        if wide.parts == 1:
            return wide
        return wide.with_stages(wide.tuning.num_stages, self._loaded_bytes)  # parts of K need depth

    def _reads(self, shape: Shape, layout: WeightLayout | None) -> dict[str, Buffer]:
        _, in_features = shape
        return {
            **activations(layout, self._act, in_features),
            "in_squares": buffer("f32", "tokens", in_features // GROUP),
            **matrix(layout or RowMajor(self._act), shape),
        }

    def _kernel(
        self,
        name: str,
        function: object,
        interface: Interface,
        shape: Shape,
        layout: WeightLayout | None,
        tile: MatmulTile,
        constexprs: Mapping[str, Constexpr],
        columns: int | None = None,
    ) -> Kernel:
        """Return a matmul with a grid of token tiles by tiles of `columns` (default: output features)."""
        out_features, in_features = shape
        return Kernel(
            name=f"{name}{kind_of(layout)}_{out_features}x{in_features}_{tile.suffix}",
            function=function,
            interface=interface,
            constexprs={
                "IN": in_features,
                "EPS": self._spec.rms_norm_eps,
                "GROUP": GROUP,
                "BLOCKS": block_constants(layout),
                **dict.fromkeys({"x_scales", *MATRIX} - interface.reads.keys()),
                **constexprs,
                **tile.constexprs(item_bytes(layout, self._act)),
            },
            grid=[Tiles("tokens", tile.rows), -(-(columns or out_features) // tile.columns)],
            tuning=tile.tuning,
        )


def kind_of(layout: WeightLayout | None) -> str:
    """Return the part of a kernel's name that identifies the layout of its weight."""
    match layout:
        case BlockRows(blocks):
            return f"_{blocks}"
        case Fp8Rows():
            return "_fp8"
    return ""


def block_constants(layout: WeightLayout | None) -> tuple[int, ...] | None:
    """Return the constant BLOCKS of kernels/triton/blocks.py; None for weights that are not in blocks."""
    if not isinstance(layout, BlockRows):
        return None
    blocks = layout.blocks
    group = 0 if layout.terms_in_bf16 else blocks.group or 0  # of terms, as they are stored
    return blocks.bits, blocks.size, group, int(blocks.is_e2m1), int(layout.terms_in_bf16)


def matrix(layout: WeightLayout, shape: Shape) -> dict[str, Buffer]:
    """Return the buffers of the operands of a weight: the ones in MATRIX that its layout has."""
    stored = layout.stored("w", shape).values()
    return {name: buffer(dtype, *sizes) for name, (sizes, dtype) in zip(MATRIX, stored, strict=False)}


def load_matrix(e: Emitter, weights: WeightTypes, name: str) -> dict[str, Tensor]:
    """Load a weight; return its operands by name."""
    return dict(zip(MATRIX, weights.load(e, name), strict=False))


def quantised(dtype: str, features: int, count: str = "tokens") -> dict[str, Buffer]:
    """Return the buffers of x [count, features] in 8-bit floats, and of its scales (kernels/triton/fp8.py).

    `count` names the dynamic size.
    """
    return {
        "x": buffer(dtype, count, features),
        "x_scales": buffer("f32", count, -(-features // FP8_GROUP)),
    }


def activations(
    layout: WeightLayout | None, act: FloatType, features: int, count: str = "tokens"
) -> dict[str, Buffer]:
    """Return the buffers of the input x [count, features] of a matmul with a weight in `layout`."""
    if isinstance(layout, Fp8Rows):
        return quantised(layout.dtype, features, count)
    return {"x": buffer(act, count, features)}


def item_bytes(layout: WeightLayout | None, act: FloatType) -> int:
    """Return the bytes of an element of a matmul's input x, for a weight in `layout`."""
    return 1 if isinstance(layout, Fp8Rows) else FLOAT_DTYPES[act].itemsize


def deferred(act: str, features: int, count: str = "tokens") -> dict[str, Buffer]:
    """Return the buffers of a deferred norm of x [count, features], which the next matmuls read."""
    return {
        "scaled": buffer(act, count, features),
        "squares": buffer("f32", count, features // GROUP),
    }
