"""Matmuls of 8-bit floats against numpy, on the chips that have matrix instructions for them."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Tuning
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.layout import FP8_DTYPES, Fp8Rows
from shortfin_apps.llm.contract.gpu_code.chips import Fp8Type
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_model import TINY
from tests.builder.kernels.triton.conftest import Launch, context_of
from tests.builder.kernels.triton.given_weights import GivenWeights
from tests.builder.kernels.triton.launched import Inputs, rounded
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.kernels.triton import FP8_GROUP
from shortfin_apps.llm.builder.lowering.triton import layers as lowered
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher
from shortfin_apps.llm.builder.lowering.triton.layers import TritonLayers
from shortfin_apps.llm.builder.lowering.triton.operands import Activations, MatmulOperands
from shortfin_apps.llm.builder.lowering.triton.tiles import MatmulTile, Use, tiles_of
from tests.builder.specs import changed

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(300)]

F32 = npt.NDArray[np.float32]
LEAST_EXPONENT = -126  # of a scale
FEATURES, FFN = 80, 176  # neither is a multiple of what shares a scale, the second is more than that
SPEC = changed(TINY, {"hidden_size": FEATURES, "features": FFN})


@pytest.fixture(params=["gfx942", "gfx950", "gfx1201"])
def chip(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def fp8_type(chip: str) -> Fp8Type:
    found = resolve_target(f"hip:{chip}").fp8
    assert found is not None
    return found


def quantised(x: F32, kind: Fp8Type) -> tuple[npt.NDArray[Any], F32]:
    """X [rows, features] in 8 bits, and the powers of two [rows, groups] that groups of it share."""
    dtype, top = FP8_DTYPES[kind], 6 if kind.endswith("FNUZ") else 7
    quants, scales = [], []
    for first in range(0, x.shape[1], FP8_GROUP):
        part = x[:, first : first + FP8_GROUP]
        largest = np.abs(part).max(axis=1, keepdims=True)
        _, exponent = np.frexp(largest)  # largest is in [2^(exponent - 1), 2^exponent)
        scale = np.ldexp(np.float32(1), np.where(largest > 0, exponent - 1 - top, LEAST_EXPONENT))
        quants.append((part / scale).astype(dtype))
        scales.append(scale)
    return np.concatenate(quants, axis=1), np.concatenate(scales, axis=1)


def rounded_to_fp8(x: F32, kind: Fp8Type) -> F32:
    """X [rows, features] as matmuls take it."""
    quants, scales = quantised(x, kind)
    result: F32 = quants.astype(np.float32) * np.repeat(scales, FP8_GROUP, axis=1)[:, : x.shape[1]]
    return result


def stored(weight: F32, kind: Fp8Type) -> tuple[npt.NDArray[Any], F32, F32]:
    """Quants, scales, and what they stand for."""
    quants, scales = Fp8Rows(kind).store(weight)
    return quants, scales, quants.astype(np.float32) * scales[:, None]


def cast(e: Emitter, given: Tensor, dtype: str) -> Tensor:
    """Bytes as 8-bit floats or back, as runtimes have no arrays of these."""
    result = Tensor(e.fresh(), given.shape, dtype)
    sizes = [size for size in given.shape if isinstance(size, str)]
    dims = f"{{{', '.join(sizes)}}}" if sizes else ""
    e.line(f"{result.name} = flow.tensor.bitcast {given.name} : {given.type}{dims} -> {result.type}{dims}")
    return result


def random_rows(random: np.random.Generator, count: int, features: int) -> F32:
    """In bf16, of many magnitudes; the first is zero."""
    x = rounded(random.standard_normal((count, features), np.float32), "bf16")
    x *= np.exp2(random.integers(-20, 20, (count, 1))).astype(np.float32)  # each row has its own scale
    x[0] = 0
    return x


@pytest.mark.parametrize("tokens", [1, "tokens"])
def test_a_host_quantises_activations_to_the_same_bits(tokens: int | str, chip: str, launch: Launch) -> None:
    kind = fp8_type(chip)
    context = context_of(SPEC, chip, BuildOptions(device=f"hip:{chip}", weights="fp8", kv="f32"))
    inputs: Inputs = {"x": ("bf16", (tokens, FFN)), "w": ("i8", (32, FFN)), "scales": ("f32", (32,))}

    def body(e: Emitter, given: dict[str, Tensor]) -> list[Tensor]:
        weights = GivenWeights({"w": cast(e, given["w"], kind), "w.scales": given["scales"]})
        launcher = Launcher(context.target, context.rendered)
        operands = MatmulOperands(replace(context, weights=weights), launcher)
        made = operands.activations(e, given["x"], "w")
        x, scales = made["x"], made["x_scales"]
        assert isinstance(x, Tensor)
        assert isinstance(scales, Tensor)
        return [cast(e, x, "i8"), scales]

    program = launch(inputs, body, context)
    for count in [3, 70] if isinstance(tokens, str) else [tokens]:
        x = random_rows(np.random.default_rng(count), count, FFN)
        found = program(x=x, w=np.zeros((32, FFN)), scales=np.zeros(32))
        quants, scales = quantised(x, kind)
        np.testing.assert_array_equal(found[0].astype(np.int8), quants.view(np.int8))
        np.testing.assert_array_equal(found[1], scales)


@pytest.mark.parametrize(
    ("tokens", "parts"), [*((tokens, 1) for tokens in (1, 16, 30, 50, "tokens")), (16, 4)]
)
def test_a_feed_forward(
    tokens: int | str, parts: int, chip: str, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = fp8_type(chip)
    if parts > 1:  # as Hopper's
        only = [Use(sys.maxsize, sys.maxsize, MatmulTile(8, 16, 512, Tuning(4, 2), parts=parts))]
        monkeypatch.setattr(lowered, "tiles_of", lambda target: replace(tiles_of(target), fp8=only))
    random = np.random.default_rng(7)
    gate_up = random.standard_normal((2 * FFN, FEATURES), np.float32) * np.float32(FEATURES**-0.5)
    down = random.standard_normal((FEATURES, FFN), np.float32) * np.float32(FFN**-0.5)
    context = context_of(SPEC, chip, BuildOptions(device=f"hip:{chip}", weights="fp8", kv="f32"))
    inputs: Inputs = {
        "x": ("bf16", (tokens, FEATURES)),
        "residual": ("f32", (tokens, FEATURES)),
        "gate_up": ("i8", gate_up.shape),
        "gate_up_scales": ("f32", gate_up.shape[:1]),
        "down": ("i8", down.shape),
        "down_scales": ("f32", down.shape[:1]),
    }

    def body(e: Emitter, given: dict[str, Tensor]) -> list[Tensor]:
        tensors = {
            name: cast(e, given[name], kind) if name in ("gate_up", "down") else given[name]
            for name in ("gate_up", "down")
        }
        tensors |= {f"{name}.scales": given[f"{name}_scales"] for name in ("gate_up", "down")}
        layers = TritonLayers(replace(context, weights=GivenWeights(tensors)))
        gated = layers.gated_linear(e, Activations(given["x"]), "gate_up", "silu")
        return [layers.linear(e, gated, "down", given["residual"])]

    program = launch(inputs, body, context)
    gate_up_quants, gate_up_scales, gate_up = stored(gate_up, kind)
    down_quants, down_scales, down = stored(down, kind)
    for count in [3, 70] if isinstance(tokens, str) else [tokens]:
        x = random_rows(random, count, FEATURES)
        residual = random.standard_normal((count, FEATURES), np.float32)
        (y,) = program(
            x=x,
            residual=residual,
            gate_up=gate_up_quants.view(np.int8),
            gate_up_scales=gate_up_scales,
            down=down_quants.view(np.int8),
            down_scales=down_scales,
        )
        gate, up = np.split(rounded_to_fp8(x, kind) @ gate_up.T, 2, axis=1)
        with np.errstate(over="ignore"):
            gated = rounded(gate / (1 + np.exp(-gate)) * up, "bf16")
        expected = residual + rounded_to_fp8(gated, kind) @ down.T
        size = np.abs(expected).max(axis=1, keepdims=True)
        np.testing.assert_allclose(y / size, expected / size, rtol=0, atol=2e-2)
