"""A decode's layer in one dispatch: to the bit what its attention and the rest of it make apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.avx512.attention import Bf16Attention
from shortfin_apps.llm.builder.lowering.cpu.attention import VectorAttention
from shortfin_apps.llm.builder.lowering.fused.layers import FusedLayers
from shortfin_apps.llm.builder.lowering.fused.stage_kernels import StageKernels
from shortfin_apps.llm.builder.lowering.lowering import Lowering, LoweringContext, RenderedKernels, Values
from shortfin_apps.llm.model.attention import Attend
from shortfin_apps.llm.model.kv_layout import KVType, kv_dtype
from shortfin_apps.llm.model.operations import GatedLinear, Linear, Norm
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, WeightType
from tests.builder.compiled_kernels import cpu_or_skip, load
from tests.builder.compiled_model import block_table
from tests.builder.crowd import check_in_a_crowd
from tests.builder.decode_batch import decode_batch
from tests.builder.lowering.avx512.test_attention import as_type
from tests.builder.lowering.fused.test_layers import KINDS, SPEC, layer_operations, make_weights
from tests.builder.specs import changed, page_elements
from tests.matrices import slow_but

WHOLE_TILES = changed(SPEC, {"head_dim": 32, "cap": 20.0, "sinks": True}, at={1: {"window": 50}})
PAGES = 80
BITS = {"bf16": "i16", "q8_0": "i8"}  # integers of as many bits as an element of the cache has
NAN = -1  # every bit set: NaN as bf16
Arrays = dict[str, npt.NDArray[Any]]

CASES: list[tuple[str, WeightType, KVType]] = [
    *((cpu, kind, "bf16") for cpu in ("amx", "avx512") for kind in KINDS),
    *((cpu, "bf16", "q8_0") for cpu in ("amx", "avx512", "avx2")),
    *((cpu, "bf16", "bf16") for cpu in ("avx512-no-bf16", "avx2")),
    *(("avx2", "f32", "bf16"), ("avx2", "q4", "bf16")),
]
QUICK = [("avx512", "bf16", "bf16"), ("avx2", "bf16", "q8_0")]


@dataclass(frozen=True)
class Layers:
    module: Any
    options: BuildOptions
    vmfb: Path

    def run(self, name: str, inputs: Arrays) -> list[npt.NDArray[Any]]:
        return [result.to_host() for result in self.module[name](*inputs.values())]


def entry(name: str, number: int, spec: ModelSpec, options: BuildOptions, lowering: Lowering) -> str:
    """X and q, k, v [rows, features], the decode's batch, the cache's bits -> x past the layer, the next
    one's q, k and v if there is one, the cache's new bits.
    """
    types = {
        "x": f"tensor<?x{spec.hidden_size}xf32>",
        "qkv": f"tensor<?x{spec.attention.qkv_features}xf32>",
        "rotary": f"tensor<?x2x{spec.attention.head_dim // 2}xf32>",
        "starts": "tensor<?xi64>",
        "seq_lens": "tensor<?xi64>",
        "token_rows": "tensor<?xi64>",
        "blocks": "tensor<?x?xi64>",
        "bits": f"tensor<?x{page_elements(spec, options)}x{BITS[options.kv]}>",
    }
    e = Emitter()

    def dim(argument: str, axis: int) -> str:
        return e.value(f"tensor.dim %{argument}, {e.constant(axis)} : {types[argument]}")

    rows, width, pages = dim("x", 0), dim("blocks", 1), dim("bits", 0)
    batch = decode_batch(options, spec, rows=rows, width=width, pages=pages)
    bits = Tensor("%bits", batch.cache.shape, BITS[options.kv])
    batch.cache = as_type(e, bits, options.cache_dtype)
    x, qkv = (
        Tensor(f"%{n}", (rows, size), "f32")
        for n, size in (("x", spec.hidden_size), ("qkv", spec.attention.qkv_features))
    )
    values, names = Values({"x": x, "qkv": qkv}, batch), ["x", "qkv"][: len(spec.layers) - number]
    lowering.lower(e, layer_operations(spec, number), values, names)
    results = [*(values[name] for name in names), as_type(e, batch.cache, bits.dtype)]
    arguments = ", ".join(f"%{argument}: {kind}" for argument, kind in types.items())
    kinds = ", ".join(result.type for result in results)
    lines = "\n".join(e.lines)
    returned = ", ".join(result.name for result in results)
    return f"func.func @{name}({arguments}) -> ({kinds}) {{\n{lines}\nreturn {returned} : {kinds}\n}}"


@pytest.fixture(scope="module", params=slow_but(QUICK, CASES), ids="-".join)
def layers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Layers:
    cpu, kind, kv = request.param
    target, options = cpu_or_skip(cpu), BuildOptions(weights=kind, kv=kv)
    weights = make_weights(WHOLE_TILES, options, target)
    rendered = RenderedKernels()
    context = LoweringContext(WHOLE_TILES, options, target, weights, rendered)
    attention = Bf16Attention(context) if target.has_bf16_dot else VectorAttention(context)

    def lowering(joint: Bf16Attention | VectorAttention | None) -> Lowering:
        kernels = StageKernels(WHOLE_TILES, weights, options.activations, options.block_bits, target)
        fused = FusedLayers(weights, rendered.render, list(WHOLE_TILES.operations()), kernels)
        fused.attention = joint
        chosen = {Attend: attention, Norm: fused, Linear: fused, GatedLinear: fused}
        return Lowering(chosen, rendered, fused)

    functions = [
        entry(f"{name}_{number}", number, WHOLE_TILES, options, lowering(joint))
        for name, joint in (("together", attention), ("apart", None))
        for number in range(len(WHOLE_TILES.layers))
    ]
    for name in ("decode_fused_layer_x_qkv", "windowed_decode_fused_layer_x"):
        assert any(made.startswith(name) for made in rendered.texts)
    text = "\n".join(["module @layers {", *weights.declarations(), *rendered.texts.values(), *functions, "}"])
    folder = tmp_path_factory.mktemp("layers")
    return Layers(load(text, folder), options, folder / "kernel.vmfb")


def make_inputs(lengths: list[int], options: BuildOptions) -> Arrays:
    """Rows that so many tokens precede; one below 0 is padding. What no row reads is NaN."""
    spec, rng, rows = WHOLE_TILES, np.random.default_rng(len(lengths)), len(lengths)
    stride = options.block_seq_stride
    blocks = block_table(rng, [length // stride + 1 if length >= 0 else 0 for length in lengths], 9, PAGES)
    # bf16, or the halves of scales and two bytes each.
    cache = np.full((PAGES, page_elements(spec, options) * kv_dtype(options.kv).itemsize // 2), NAN, np.int16)
    cache[np.unique(blocks)] = rng.integers(0x3C00, 0x3F80, (len(np.unique(blocks)), cache.shape[1]))
    cache = cache.view(np.int8 if BITS[options.kv] == "i8" else np.int16)
    starts = np.maximum(np.array(lengths, np.int64), 0)
    return {
        "x": rng.standard_normal((rows, spec.hidden_size)).astype(np.float32),
        "qkv": rng.standard_normal((rows, spec.attention.qkv_features)).astype(np.float32),
        "rotary": rng.uniform(-1, 1, (rows, 2, spec.attention.head_dim // 2)).astype(np.float32),
        "starts": starts,
        "seq_lens": np.where(np.array(lengths) < 0, 0, starts + 1),
        "token_rows": np.arange(rows, dtype=np.int64),
        "blocks": blocks,
        "cache": cache,
    }


@pytest.mark.parametrize("number", range(len(WHOLE_TILES.layers)))
@pytest.mark.parametrize("lengths", [[0], [130], [15, -1, 16, 70, 5], [*range(33)]], ids=len)
def test_the_fused_layer_gives_the_bits_of_separate_dispatches(
    layers: Layers, number: int, lengths: list[int]
) -> None:
    inputs = make_inputs(lengths, layers.options)
    together = layers.run(f"together_{number}", inputs)
    apart = layers.run(f"apart_{number}", inputs)
    # Of the cache, page 0 is scratch: what padding leaves there is nobody's.
    for one, other in zip([*together[:-1], together[-1][1:]], [*apart[:-1], apart[-1][1:]], strict=True):
        np.testing.assert_array_equal(one, other)
    rows = [row for row, length in enumerate(lengths) if length >= 0]
    assert np.isfinite(together[0][rows]).all()
    assert not np.array_equal(together[-1], inputs["cache"])


def test_more_workers_than_cores_finish_with_the_same_result(layers: Layers, tmp_path: Path) -> None:
    inputs = make_inputs([40] * 20, layers.options)
    expected = layers.run("together_0", inputs)
    check_in_a_crowd(layers.vmfb, "together_0", list(inputs.values()), expected, tmp_path, calls=50)
