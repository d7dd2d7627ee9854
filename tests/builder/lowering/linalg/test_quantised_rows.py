"""Rows of the cache in bytes, written and read by linalg, against numpy to the bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.linalg.quantised_rows import quantised_rows, scales_of
from shortfin_apps.llm.model.attention import quantised_heads
from tests.builder.compiled_kernels import F32, function, load

KV_HEADS, HEAD_DIM, ROW = 3, 8, 48
FEATURES, USED = KV_HEADS * HEAD_DIM, KV_HEADS * (HEAD_DIM + 4)
Quantise = Callable[[F32], tuple[npt.NDArray[np.int8], F32]]


@pytest.fixture(scope="module")
def quantise(tmp_path_factory: pytest.TempPathFactory) -> Quantise:
    def body(e: Emitter, x: Tensor) -> list[Tensor]:
        rows = quantised_rows(e, x, KV_HEADS, ROW)
        return [rows, scales_of(e, rows)]

    module = load(function("f", {"x": ("?", FEATURES)}, body), tmp_path_factory.mktemp("rows"))

    def call(x: F32) -> tuple[npt.NDArray[np.int8], F32]:
        rows, scales = module.f(x)
        return rows.to_host(), scales.to_host()

    return call


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    x=npst.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.just(FEATURES)),
        elements=st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)
        | st.integers(-127, 127).map(float),
    )
)
def test_heads_and_scales_are_those_of_numpy(quantise: Quantise, x: F32) -> None:
    quants, scales = quantised_heads(x.reshape(-1, KV_HEADS, HEAD_DIM))
    rows, as_floats = quantise(x)
    np.testing.assert_array_equal(rows[:, FEATURES:USED].copy().view(np.float32), scales)
    np.testing.assert_array_equal(as_floats[:, FEATURES // 4 : USED // 4], scales)
    np.testing.assert_array_equal(rows[:, :FEATURES].reshape(quants.shape), quants)


@pytest.mark.parametrize("number", [np.nan, -np.nan])
def test_a_head_with_nan_gets_a_scale_of_nan_and_no_other_head_does(
    quantise: Quantise, number: float
) -> None:
    x = np.random.default_rng(1).standard_normal((2, FEATURES), np.float32)
    _, clean = quantise(x)
    x[1, HEAD_DIM + 5] = number
    _, scales = quantise(x)
    assert np.isnan(scales[1, FEATURES // 4 + 1])
    scales[1, FEATURES // 4 + 1] = clean[1, FEATURES // 4 + 1]
    np.testing.assert_array_equal(scales[:, FEATURES // 4 : USED // 4], clean[:, FEATURES // 4 : USED // 4])
