"""Which layout each weight has, by the target and by what its kernels can read."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.layout import (
    DOT_BYTES,
    PANEL,
    BlockRows,
    Fp8Rows,
    Int8Panels,
    Panels,
    QuantisedPanels,
    RowMajor,
    Taps,
    TilePanels,
    WeightLayout,
)
from shortfin_apps.llm.model.block import Block
from shortfin_apps.llm.model.feed_forward import GatedExperts
from shortfin_apps.llm.model.layer_inputs import TABLE
from shortfin_apps.llm.model.operations import GatedLinear, Linear, ModelTensor
from shortfin_apps.llm.model.spec import (
    BuildOptions,
    FloatType,
    ModelSpec,
    WeightType,
    stacked_shape,
    weight_parts,
)
from shortfin_apps.llm.model.weight_blocks import BLOCK, Q4_1, Q8_0, BlockType

MATRIX_BYTES = 8  # bytes along K per NEON matrix product (SMMLA)
EXPERTS = ("ffn_gate_up_exps.weight", "ffn_down_exps.weight")


@lru_cache(maxsize=64)
def linear_sizes(block: Block, hidden: int) -> frozenset[int] | None:
    """Return the dimensions of the matrices of a model's block, such as an attention or a feed-forward.

    None if another operation than Linear or GatedLinear reads one of the matrices. Gate and up count as two
    matrices.
    """
    sizes: set[int] = set()
    readers = {o.weight: o for o in block.operations(0, "x", "x") if isinstance(o, Linear | GatedLinear)}
    for name, parts in weight_parts(tensor.of_layer(0) for tensor in block.tensors(hidden)).items():
        rows, *columns = stacked_shape(parts)
        if not columns:
            continue
        if name not in readers or parts[0].stored != "weights":
            return None
        sizes |= {rows // 2 if isinstance(readers[name], GatedLinear) else rows, *columns}
    return frozenset(sizes)


def fills_panels(spec: ModelSpec) -> bool:
    """Whether the sizes of all matrices are multiples of 32, and only Linear and GatedLinear read them."""
    sizes = [linear_sizes(block, spec.hidden_size) for block in spec.blocks]
    inputs = {spec.layer_inputs.all_features} if spec.layer_inputs else set()
    own = frozenset({spec.hidden_size, spec.vocab_size, *inputs})
    return all(each is not None and all(size % PANEL == 0 for size in each) for each in (own, *sizes))


def fills_tiles(spec: ModelSpec, activations: FloatType, target: Target) -> bool:
    """Whether the CPU has AMX for these activations, and all matrices of the model are whole tiles.

    f16 activations need AMX with f16; bf16 activations need AMX with bf16 and int8, and AVX-512 VNNI.
    """
    in_bf16 = activations == "bf16" and target.has_amx_int8 and target.has_int8_dot
    in_f16 = activations == "f16" and target.has_amx_fp16
    return (in_bf16 or in_f16) and fills_panels(spec)


def multiplies_blocks(spec: ModelSpec, target: Target) -> bool:
    """Whether the CPU multiplies quantised blocks as integers, and the model's sizes allow it."""
    return target.multiplies_blocks and fills_panels(spec)


def multiplies_matrices(spec: ModelSpec, target: Target) -> bool:
    """Whether integers are multiplied with SMMLA, NEON's matrix products.

    Only the fused layer supports SMMLA.
    """
    return target.has_smmla and fills_panels(spec)


def multiplies_pairs(spec: ModelSpec, options: BuildOptions, target: Target) -> bool:
    """Whether float matmuls use dot products of bf16 pairs.

    On aarch64, only the fused layer supports these dot products.
    """
    has_dot = target.has_bf16_dot or (target.has_neon_bf16_dot and fills_panels(spec))
    return options.activations == "bf16" and has_dot


def experts_fill_tiles(spec: ModelSpec, options: BuildOptions, target: Target) -> bool:
    """Whether the CPU has AMX for the experts' bf16 or f16 matrices, and these consist of whole tiles."""
    has_tiles = {"bf16": target.has_amx, "f16": target.has_amx_fp16}.get(options.weights, False)
    if spec.experts is None or not has_tiles:
        return False
    in_blocks = any(name.endswith(EXPERTS) for name, _ in options.block_types)
    return not in_blocks and spec.hidden_size % PANEL == spec.experts.features % PANEL == 0


def weight_layout(name: str, spec: ModelSpec, options: BuildOptions, target: Target) -> WeightLayout:
    """Return the layout of the weight `name` that the target's kernels read."""
    tensor, gated = _weights_of(spec)[name]
    if len(tensor.shape) < 2:
        return RowMajor("f32")
    if tensor.stored == "taps":
        return Taps()
    if tensor.stored == "rows":
        return RowMajor(options.activations)
    if tensor.stored == "floats":
        options = replace(options, weights=options.activations)
    # Rows that are not whole blocks stay floats.
    made = made_blocks(name, options.weights) if tensor.shape[-1] % BLOCK == 0 else None
    blocks = dict(options.block_types).get(name, made)
    if not target.is_cpu:
        if options.weights == "fp8" and target.fp8 and name.startswith("blk."):  # no embedding or head
            return Fp8Rows(target.fp8)
        # Only Embed has a kernel that reads rows of blocks, not EmbedLayers.
        if blocks is None or name == TABLE:
            return RowMajor(options.activations)
        return block_rows(blocks, options.activations, target)
    pair = 2 if multiplies_pairs(spec, options, target) else 1
    byte_pair = MATRIX_BYTES if multiplies_matrices(spec, target) else DOT_BYTES
    block_pair = byte_pair if multiplies_blocks(spec, target) else pair
    if blocks is not None:
        widened = blocks.is_e2m1 and multiplies_blocks(spec, target)  # floats to integers
        return QuantisedPanels(Q8_0 if widened else blocks, block_pair, gated)
    match options.weights:
        case "int8":
            return Int8Panels(gated, byte_pair)
        case _ if fills_tiles(spec, options.activations, target):
            return TilePanels(options.activations, gated)
        case _ if name.endswith(EXPERTS) and experts_fill_tiles(spec, options, target):
            return TilePanels(options.activations, gated)
        case _:
            return Panels(options.activations, pair, gated)


def block_rows(blocks: BlockType, activations: FloatType, target: Target) -> BlockRows:
    """Return the layout of blocks for a GPU.

    Terms in bf16 take up to half a bit per weight more than those of groups. For two terms of each 16 weights
    it would be a whole bit.
    """
    is_small = blocks.size < BLOCK and blocks.has_minima
    multiplied_in_bf16 = target.architecture == "nvptx" and activations == "bf16"
    in_bf16 = multiplied_in_bf16 and not is_small and not blocks.is_e2m1
    return BlockRows(blocks, terms_in_bf16=in_bf16)


@lru_cache(maxsize=8)
def _weights_of(spec: ModelSpec) -> dict[str, tuple[ModelTensor, bool]]:
    """Map the name of each weight to its first tensor, and to whether the weight stacks gate and up."""
    gated = {o.weight for o in spec.all_operations() if isinstance(o, GatedLinear | GatedExperts)}
    return {name: (parts[0], name in gated) for name, parts in weight_parts(spec.tensors()).items()}


def made_blocks(name: str, weights: WeightType) -> BlockType | None:
    """Return the type of blocks that floats are quantised to; None for weight types without blocks."""
    match weights:
        case "q8_0":
            return Q8_0
        case "q4":
            # As in 4-bit GGUF files, embedding and head have 8 bits, because their errors cost most quality.
            return Q4_1 if name.startswith("blk.") else Q8_0
        case _:
            return None
