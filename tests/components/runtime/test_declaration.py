from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.runtime.declaration import (
    MLIR_DTYPES,
    format_type,
    parse_declaration,
)
from shortfin_apps.llm.components.runtime.device import TensorType

DIMS = st.lists(st.none() | st.integers(0, 10**6), max_size=4).map(tuple)
TYPES = st.builds(TensorType, DIMS, st.sampled_from(list(MLIR_DTYPES.values())))


@given(
    st.lists(TYPES, max_size=5), st.lists(TYPES, max_size=3), st.from_regex(r"[a-z_]\w{0,20}", fullmatch=True)
)
def test_a_declaration_survives_a_round_trip(
    arguments: list[TensorType], results: list[TensorType], name: str
) -> None:
    inputs = ", ".join(f"%input{i}: {format_type(each)}" for i, each in enumerate(arguments))
    outputs = ", ".join(f"%output{i}: {format_type(each)}" for i, each in enumerate(results))
    text = f"async func @{name}({inputs}) -> ({outputs})"
    assert parse_declaration(text) == (tuple(arguments), tuple(results))


@given(st.text())
def test_arbitrary_text_is_not_a_declaration(text: str) -> None:
    assert parse_declaration(text) is None


def test_names_and_attributes_as_iree_writes_them() -> None:
    text = (
        "sync func @main(%tokens: tensor<8x?xi64> {iree.abi.encoding = tensor<8x?xi32>, a = (i32) -> i64}, "
        "%x.1: tensor<bf16>) -> (%output0: tensor<?xf8E4M3FNUZ>)"
    )
    parsed = parse_declaration(text)
    assert parsed is not None
    assert [format_type(t) for t in parsed[0]] == ["tensor<8x?xi64>", "tensor<bf16>"]
    assert [format_type(t) for t in parsed[1]] == ["tensor<?xf8E4M3FNUZ>"]
    assert parsed[0][0] == TensorType((8, None), np.dtype(np.int64))


@pytest.mark.parametrize(
    "text",
    [
        "some.python.thing(types_are_overrated)",
        "sync func @f(%x: !hal.buffer_view) -> (%y: tensor<f32>)",
        "sync func @f(%x: tensor<4xcomplex<f32>>) -> ()",
        "sync func @f(%x: tensor<4xi3>) -> ()",
        "sync func @f(%x: tensor<-4xi32>) -> ()",
        "sync func @f(%x: tensor<f32>,) -> ()",
    ],
)
def test_types_other_than_tensors_are_not_parsed(text: str) -> None:
    assert parse_declaration(text) is None


def test_a_function_without_arguments_and_results() -> None:
    assert parse_declaration("async func @f() -> ()") == ((), ())
