"""Latent attention with heads of published sizes against numpy: q, keys, attention and values by head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.batch import Batch, Slab
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, Values
from shortfin_apps.llm.model.latent_attention import AbsorbKeys, AttendLatent, ExpandValues, LatentAttention
from shortfin_apps.llm.model.operations import Operation, PagedOperation
from shortfin_apps.llm.model.reference.pointwise import rms_norm
from shortfin_apps.llm.model.reference.rotary import rotary, rotate
from shortfin_apps.llm.model.rope import Rope
from shortfin_apps.llm.model.spec import BuildOptions, FloatType, ModelSpec
from tests.builder.compiled_model import LATENT
from tests.builder.kernels.triton.conftest import Launch, context_of
from tests.builder.kernels.triton.given_weights import GivenWeights
from tests.builder.kernels.triton.launched import Array, Inputs, rounded
from tests.builder.kernels.triton.test_attention import Rows
from tests.builder.specs import page_elements
from tests.hip import CHIPS
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton.latent_attention import TritonLatentAttention
from shortfin_apps.llm.builder.lowering.triton.tiles import latent_groups

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(400)]

F32 = npt.NDArray[np.float32]
LAYER = 1
BLOCKS = {
    "v2-lite": LatentAttention(heads=16, rank=512, plain=128, rotated=64, value_dim=128, rope=Rope()),
    "groups": LatentAttention(heads=20, rank=512, plain=192, rotated=64, value_dim=256, rope=Rope()),
    "odd": LatentAttention(heads=6, rank=20, plain=10, rotated=6, value_dim=14, rope=Rope(), score_scale=1.4),
}
PACKED = Rows([5, 0, 300, 48], [1, 18, 1, 3], padding=3)
DECODE = Rows([15, 0, 300], [1, 1, 1], chunk=1)
TOLERANCES: dict[FloatType, float] = {"f32": 1e-4, "bf16": 3e-2}


def spec_of(block: LatentAttention) -> ModelSpec:
    return replace(LATENT, layers=2 * ((block, LATENT.layers[0][1]),))


def operations_of(block: LatentAttention) -> list[Operation]:
    wanted = AbsorbKeys | AttendLatent | ExpandValues
    return [each for each in block.operations(LAYER, "x", "out") if isinstance(each, wanted)]


def inputs_of(block: LatentAttention, dtype: FloatType, elements: int) -> Inputs:
    return {
        "joint": ("f32", ("tokens", block.joint_features)),
        "w": (dtype, (block.heads * block.expanded_dim, block.rank)),
        "norm": ("f32", (block.rank,)),
        "rotary": ("f32", ("tokens", 2, block.rotated // 2)),
        "slots": ("i64", ("tokens",)),
        "cache": (dtype, ("pages", elements)),
        **dict.fromkeys(("offsets", "starts", "seq_lens"), ("i64", ("rows",))),
        "blocks": ("i64", ("rows", "width")),
    }


def emit(
    e: Emitter, context: LoweringContext, block: LatentAttention, given: dict[str, Tensor], chunk: int | None
) -> list[Tensor]:
    (tokens, _), (rows, _) = given["joint"].shape, given["blocks"].shape
    slab = Slab(pool="whole", layers=(0, 1), blocks=given["blocks"], cache=given["cache"], planes=1)
    slab.slots = given["slots"]
    batch = Batch(
        rows=rows,
        tokens=tokens,
        chunk=chunk,
        whole_pages=False,
        **{name: given[name] for name in ("starts", "seq_lens")},
        slabs=[slab],
    )
    batch.offsets, batch.rotaries = given["offsets"], {block.rotation: given["rotary"]}
    batch.counters = e.fill("0", (rows, latent_groups(block.heads)), "i32")
    prefix = f"blk.{LAYER}."
    weights = {f"{prefix}attn_kv_b.weight": given["w"], f"{prefix}attn_kv_a_norm.weight": given["norm"]}
    kernels = TritonLatentAttention(replace(context, weights=GivenWeights(weights)))
    values = Values({"joint": given["joint"]}, batch)
    for operation in operations_of(block):
        if isinstance(operation, PagedOperation):
            batch.turn_to(operation.layer, operation.rotation)
        values[operation.out] = kernels.compute(e, operation, values)
    return [values["expanded"]]


def arguments(block: LatentAttention, dtype: FloatType, rows: Rows, elements: int) -> dict[str, Array]:
    rng = np.random.default_rng(rows.tokens)
    num_pages = len(rows.seq_lens) * rows.width + 1
    blocks = rng.permutation(np.arange(1, num_pages)).reshape(-1, rows.width)
    turns, slots = np.zeros((rows.tokens, 2, block.rotated // 2)), np.zeros(rows.tokens, np.int64)
    for row, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True)):
        for i in range(length):
            token, position = rows.offsets[row] + i, start + i
            turns[token] = np.stack(rotary(block.rotation, position, 1, 512))[:, 0, 0]
            page = blocks[row, position // rows.stride]
            slots[token] = page * 2 * rows.stride + position % rows.stride
    w = rng.standard_normal((block.heads * block.expanded_dim, block.rank)) * block.rank**-0.5
    return {
        **rows.arguments,
        "joint": rng.standard_normal((rows.tokens, block.joint_features)).astype(np.float32),
        "w": rounded(w, dtype),
        "norm": rng.uniform(0.5, 1.5, block.rank).astype(np.float32),
        "rotary": turns,
        "slots": slots,
        "cache": rounded(rng.standard_normal((num_pages, elements)), dtype),
        "blocks": blocks,
    }


def reference(block: LatentAttention, dtype: FloatType, rows: Rows, given: dict[str, Array]) -> F32:
    """[tokens, heads * value_dim], with expanded keys and values; zeros for padding."""
    q, latent, turning = np.split(given["joint"], [-block.key_dim, -block.rotated], axis=1)
    cos, sin = (given["rotary"][:, each, None].astype(np.float32) for each in range(2))
    q = q.reshape(rows.tokens, block.heads, -1)
    plain, turned = q[:, :, : block.plain], rotate(q[:, :, block.plain :], cos, sin)
    latent = rms_norm(LATENT.rms_norm_eps, latent, given["norm"])
    keys = rounded(np.concatenate([latent, rotate(turning[:, None], cos, sin)[:, 0]], axis=1), dtype)
    cache = given["cache"].reshape(len(given["cache"]), 2, rows.stride, block.key_dim)[:, LAYER]
    expansion = given["w"].reshape(block.heads, block.expanded_dim, block.rank)
    out = np.zeros((rows.tokens, block.heads, block.value_dim), np.float32)
    for row, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True)):
        first = rows.offsets[row]
        seen = cache[given["blocks"][row]].reshape(-1, block.key_dim)[:start]
        seen = np.concatenate([seen, keys[first : first + length]])
        expanded = np.einsum("kc,hdc->khd", seen[:, : block.rank], expansion)
        for token, count in zip(
            range(first, first + length), range(start + 1, start + length + 1), strict=True
        ):
            scores = np.einsum("hd,khd->hk", plain[token], expanded[:count, :, : block.plain])
            scores += turned[token] @ seen[:count, block.rank :].T
            shares = np.exp((scores - scores.max(axis=1, keepdims=True)) * block.scale)
            shares /= shares.sum(axis=1, keepdims=True)
            out[token] = np.einsum("hk,khd->hd", shares, expanded[:count, :, block.plain :])
    return out.reshape(rows.tokens, -1)


@pytest.mark.parametrize(
    ("name", "dtype", "rows", "chip"),
    [
        ("v2-lite", "bf16", PACKED, CHIPS[0]),
        ("v2-lite", "bf16", DECODE, CHIPS[1]),
        ("groups", "bf16", PACKED, CHIPS[1]),
        ("groups", "bf16", DECODE, CHIPS[0]),
        ("odd", "f32", PACKED, CHIPS[0]),
        ("odd", "f32", DECODE, CHIPS[1]),
    ],
    ids=str,
)
def test_latent_attention(name: str, dtype: FloatType, rows: Rows, chip: str, launch: Launch) -> None:
    block = BLOCKS[name]
    options = BuildOptions(device=f"hip:{chip}", weights=dtype, kv=dtype, block_seq_stride=rows.stride)
    context = context_of(spec_of(block), chip, options)
    elements = page_elements(context.spec, options)
    given = arguments(block, dtype, rows, elements)
    program = launch(
        inputs_of(block, dtype, elements), lambda e, each: emit(e, context, block, each, rows.chunk), context
    )
    [out] = program(**given)
    expected = reference(block, dtype, rows, given)
    assert np.abs(out - expected)[: rows.compared].max() <= TOLERANCES[dtype] * np.abs(expected).max()


@pytest.mark.parametrize(
    ("heads", "groups"), [(1, 1), (16, 1), (20, 2), (64, 4), (128, 8), (17, 17), (36, 3)]
)
def test_a_tile_has_at_most_16_heads_of_a_group(heads: int, groups: int) -> None:
    assert latent_groups(heads) == groups
