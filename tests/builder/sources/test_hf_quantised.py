"""Quantised matrices against what their formats' specifications say, written out element by element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.builder.sources.hf_quantised import (
    Awq,
    Fp8,
    Gptq,
    MatrixFormat,
    PackedInt4,
    matrix_format,
)
from shortfin_apps.llm.contract.errors import BuildError

Array = npt.NDArray[Any]
OUT, IN, GROUP = 16, 128, 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that is in each four bits of a word, lowest first


def packed(quants: Array, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """[rows, columns] of 0..15 -> [rows, columns / 8] int32."""
    words = np.zeros((len(quants), quants.shape[1] // 8), np.uint32)
    for row, column in np.ndindex(*words.shape):
        for place, item in enumerate(order):
            words[row, column] |= np.uint32(int(quants[row, 8 * column + item]) << 4 * place)
    return words.view(np.int32)


class Case:
    """A random matrix: integers, and scales and zeros of groups."""

    def __init__(self, seed: int = 0, group: int = GROUP) -> None:
        rng = np.random.default_rng(seed)
        self.group = group
        self.quants = rng.integers(0, 16, (OUT, IN))
        self.scales = rng.uniform(1e-3, 1e-2, (OUT, IN // group)).astype(np.float16)
        self.zeros = rng.integers(1, 16, (OUT, IN // group))

    def values(self) -> Array:
        scales, zeros = (each.repeat(self.group, axis=1) for each in (self.scales, self.zeros))
        values: Array = scales.astype(np.float32) * (self.quants - zeros).astype(np.float32)
        return values

    def gptq(self, added: int) -> dict[str, Array]:
        return {
            "qweight": packed(self.quants.T.reshape(IN // 8, 8, OUT).swapaxes(1, 2).reshape(-1, 8)).reshape(
                IN // 8, OUT
            ),
            "qzeros": packed(self.zeros.T - added),
            "scales": np.ascontiguousarray(self.scales.T),
            "g_idx": np.arange(IN, dtype=np.int32) // self.group,
        }

    def awq(self) -> dict[str, Array]:
        return {
            "qweight": packed(self.quants.T, AWQ_ORDER),
            "qzeros": packed(self.zeros.T, AWQ_ORDER),
            "scales": np.ascontiguousarray(self.scales.T),
        }

    def packed_int4(self, scale: type = ml_dtypes.bfloat16) -> dict[str, Array]:
        self.scales = self.scales.astype(scale)
        return {
            "weight_packed": packed(self.quants),
            "weight_scale": self.scales,
            "weight_zero_point": np.ascontiguousarray(packed(np.ascontiguousarray(self.zeros.T)).T),
            "weight_shape": np.array([OUT, IN]),
        }


def expect(kind: MatrixFormat, tensors: Mapping[str, Array], values: Array) -> None:
    assert kind.shape({name: each.shape for name, each in tensors.items()}) == values.shape
    blocks = kind.blocks("w", tensors)
    assert blocks is not None
    assert blocks.type == kind.block_type(values.shape[1])
    # A value is the sum of two products, each of which f32 has exactly.
    np.testing.assert_allclose(blocks.dequantise(), values, rtol=0, atol=1e-7)
    np.testing.assert_array_equal(kind.values("w", tensors), blocks.dequantise())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), added=st.sampled_from([0, 1]), group=st.sampled_from([32, 64, 128]))
def test_gptq(seed: int, added: int, group: int) -> None:
    case = Case(seed, group)
    expect(Gptq(group, added), case.gptq(added), case.values())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), group=st.sampled_from([32, 64, None]))
def test_awq(seed: int, group: int | None) -> None:
    case = Case(seed, group or IN)
    expect(Awq(group), case.awq(), case.values())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([np.float16, ml_dtypes.bfloat16]))
def test_packed_int4(seed: int, scale: type) -> None:
    case = Case(seed)
    tensors = case.packed_int4(scale)
    expect(PackedInt4(GROUP), tensors, case.values())
    signed = {**tensors, "weight_zero_point": (case.zeros - 8).astype(np.int8)}
    expect(PackedInt4(GROUP), signed, case.values())
    case.zeros[:] = 8
    del tensors["weight_zero_point"]
    expect(PackedInt4(GROUP), tensors, case.values())


def test_the_largest_zero_of_gptq_is_16() -> None:
    case = Case()
    case.zeros[:] = 16
    expect(Gptq(GROUP, 1), case.gptq(1), case.values())


@pytest.mark.parametrize(
    ("kind", "tensors", "message"),
    [
        (Gptq(GROUP, 1), Case().gptq(1) | {"g_idx": np.arange(IN)[::-1] // GROUP}, "reorders input features"),
        (PackedInt4(GROUP), Case().packed_int4() | {"weight_g_idx": np.arange(IN) % 4}, "reorders input"),
        (PackedInt4(GROUP), Case().packed_int4() | {"weight_shape": np.array([OUT, 120])}, "rows are padded"),
        (Awq(48), Case().awq(), "128 input features in groups of 48"),
        (Awq(GROUP), Case().awq() | {"scales": np.full((4, OUT), np.inf)}, "not finite in f16"),
        (Awq(64), Case().awq(), r"of shape \(16, 4\) for groups of 64"),
    ],
)
def test_what_is_refused(kind: MatrixFormat, tensors: dict[str, Array], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        kind.blocks("w", tensors)


@pytest.mark.parametrize(
    ("tile", "shape"),
    [(None, ()), (None, (1,)), (None, (24,)), (None, (24, 1)), ((16, 32), (2, 3)), ((8, 8), (3, 10))],
)
def test_fp8(tile: tuple[int, int] | None, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((24, 80)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.5, 2, shape).astype(np.float32)
    expected = np.zeros((24, 80), np.float32)
    for row, column in np.ndindex(24, 80):
        if scale.size == 1:
            one = scale.reshape(-1)[0]
        else:
            one = scale[row // tile[0], column // tile[1]] if tile else scale.reshape(-1)[row]
        expected[row, column] = np.float32(weight[row, column]) * one
    for name in ("weight_scale", "weight_scale_inv"):
        np.testing.assert_array_equal(Fp8(tile).values("w", {"weight": weight, name: scale}), expected)


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (np.zeros((8, 8), np.float16), np.ones(1), "8-bit floats of type float16"),
        (np.zeros((8, 8), ml_dtypes.float8_e4m3fn), np.ones(4), r"scales of shape \(4,\)"),
    ],
)
def test_other_fp8_is_refused(weight: Array, scale: Array, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        Fp8(None).values("w", {"weight": weight, "weight_scale": scale})


def compressed(form: str, **weights: object) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, None),
        (GPTQ, Gptq(128, 1)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1}, Gptq(None, 0)),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"}, Awq(64)),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, Fp8(None)),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, Fp8((128, 128))),
        (compressed("pack-quantized", **INT4, strategy="group", group_size=32), PackedInt4(32)),
        (compressed("pack-quantized", **INT4, strategy="channel"), PackedInt4(None)),
        (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), Fp8(None)),
        (compressed("naive-quantized", num_bits=8, type="float", strategy="tensor"), Fp8(None)),
        (
            compressed(
                "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 64]
            ),
            Fp8((128, 64)),
        ),
        (
            compressed(
                "float-quantized", num_bits=8, type="float", strategy="block", block_structure="128x64"
            ),
            Fp8((128, 64)),
        ),
        (
            compressed("pack-quantized", **INT4, strategy="channel")
            | {"sparsity_config": {"format": "dense"}, "transform_config": {}},
            PackedInt4(None),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "mixed-precision",
                "config_groups": {
                    "group_0": {"format": "pack-quantized", "weights": INT4 | {"strategy": "channel"}}
                },
            },
            PackedInt4(None),
        ),
    ],
)
def test_formats(config: dict[str, Any] | None, expected: MatrixFormat | None) -> None:
    assert matrix_format("x", config) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTQ | {"bits": 8}, r"`gptq` \(8 bits\)"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"`awq` \(4 bits, version gemv\)"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "`bitsandbytes` are not supported; give the model in floats",
        ),
        (
            compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
            "int-quantized, int8",
        ),
        (compressed("pack-quantized", num_bits=8, type="int", strategy="group"), "int8"),
        (
            compressed("pack-quantized", **INT4, strategy="channel") | {"sparsity_config": {"format": "2:4"}},
            "sparse or transformed",
        ),
        (
            compressed("pack-quantized", **INT4, strategy="channel")
            | {"transform_config": {"config_groups": {"R3": {"type": "hadamard"}}}},
            "sparse or transformed",
        ),
        ({"quant_method": "mxfp4"}, "`mxfp4`"),
        ({"bits": 4}, "`quant_method`: Field required"),
        (GPTQ | {"group_size": "many"}, "`group_size`"),
    ],
)
def test_others_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        matrix_format("x", config)
