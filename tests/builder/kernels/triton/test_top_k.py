"""Top-k against numpy: ties, infinities, both zeros and NaN, for sizes that no segment divides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_model import TINY
from tests.builder.kernels.triton.conftest import Launch, context_of
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton.top_k import TritonTopK

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(300)]

F32 = npt.NDArray[np.float32]


def hard_rows(size: int) -> F32:
    rng = np.random.default_rng(size)
    rows = rng.standard_normal((6, size)).astype(np.float32)
    rows[1] = rng.integers(-2, 3, size)  # many ties
    rows[2, rng.permutation(size)[: size // 2]] = -np.inf
    rows[2, size // 3] = np.inf
    rows[3] = np.where(rng.random(size) < 0.5, 0.0, -0.0)
    rows[4] = -np.abs(rows[4]) * 1e30
    rows[5] = -np.inf
    return rows


@pytest.mark.parametrize(("size", "k"), [(5000, 64), (300, 64), (272, 5), (4097, 1), (64, 64)])
def test_values_descend_and_ties_go_to_the_lower_index(size: int, k: int, chip: str, launch: Launch) -> None:
    context = context_of(replace(TINY, vocab_size=size), chip, BuildOptions(device=f"hip:{chip}", top_k=k))

    def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        return list(TritonTopK(context).top_k(e, tensors["logits"]))

    program = launch({"logits": ("f32", ("rows", size))}, body, context)
    rows = hard_rows(size)
    values, indices = program(logits=rows)
    order = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(values, np.take_along_axis(rows, order, axis=1))

    spoiled = rows[:2].copy()
    spoiled[0, size - 1] = np.nan
    spoiled[1, 0] = np.float32(-np.nan)
    values, indices = program(logits=np.concatenate([spoiled, rows[:1]]))
    assert np.isnan(values[:2]).all()
    assert ((indices >= 0) & (indices < size)).all()
    np.testing.assert_array_equal(indices[2], order[0])
