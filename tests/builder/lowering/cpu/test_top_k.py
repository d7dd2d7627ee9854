"""Top-k on vectors and its linalg form against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.builder.lowering.cpu.top_k import VectorTopK
from shortfin_apps.llm.builder.lowering.linalg.top_k import top_k as linalg_top_k
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, RenderedKernels
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_kernels import function, load
from tests.builder.compiled_model import HOST, TINY

SHAPES = [(512, 1), (512, 64), (1000, 7), (96, 96), (49152, 64)]


@pytest.fixture(scope="module")
def top_k_kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function of the kernel and one of the linalg form, for every shape."""
    functions: list[str] = []
    declarations: list[str] = []
    for size, k in SHAPES:
        rendered = RenderedKernels()
        options = BuildOptions(top_k=k)
        context = LoweringContext(TINY, options, HOST, WeightTypes(TINY, options, HOST), rendered)
        kernel = VectorTopK(context)
        x: dict[str, tuple[int | str, ...]] = {"x": (3, size)}
        functions.append(function(f"kernel_{size}_{k}", x, lambda e, x, f=kernel: list(f.top_k(e, x))))
        functions.append(function(f"linalg_{size}_{k}", x, lambda e, x, k=k: list(linalg_top_k(e, x, k))))
        declarations += rendered.texts.values()
    text = "\n".join(["module @kernels {", *declarations, *functions, "}"])
    return load(text, tmp_path_factory.mktemp("top_k"))


@pytest.mark.parametrize("distinct", [3, 40, 1 << 30], ids=["many-ties", "some-ties", "no-ties"])
@pytest.mark.parametrize("form", ["kernel", "linalg"])
@pytest.mark.parametrize(("size", "k"), SHAPES)
def test_results_agree_with_numpy(top_k_kernels: Any, form: str, size: int, k: int, distinct: int) -> None:
    rng = np.random.default_rng(size + k)
    logits = (rng.integers(0, distinct, (3, size)) - distinct // 2).astype(np.float32)
    logits[1, size // 2 :] = -np.inf if size // 2 >= k else logits[1, size // 2 :]
    values, indices = (r.to_host() for r in getattr(top_k_kernels, f"{form}_{size}_{k}")(logits))
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, axis=1))


def test_indices_are_valid_where_only_nan_is_left(top_k_kernels: Any) -> None:
    logits = np.full((3, 512), np.nan, np.float32)
    logits[0, 77] = 1.0
    _, indices = top_k_kernels.kernel_512_64(logits)
    assert indices.to_host()[0, 0] == 77
    assert ((indices.to_host() >= 0) & (indices.to_host() < 512)).all()


@pytest.mark.parametrize("place", [0, 0.03, 0.5, 0.999])
@pytest.mark.parametrize("form", ["kernel", "linalg"])
@pytest.mark.parametrize(("size", "k"), SHAPES)
def test_a_row_with_nan_has_nan_for_values(
    top_k_kernels: Any, form: str, size: int, k: int, place: float
) -> None:
    """Wherever it is, and though it is not the largest: the sampler sees no more of the row."""
    logits = np.random.default_rng(size).standard_normal((3, size)).astype(np.float32)
    logits[1, int(place * size)] = np.nan
    values, indices = (r.to_host() for r in getattr(top_k_kernels, f"{form}_{size}_{k}")(logits))
    assert np.isnan(values[1]).all()
    assert ((indices >= 0) & (indices < size)).all()
    for row in (0, 2):
        np.testing.assert_array_equal(indices[row], np.argsort(-logits[row], kind="stable")[:k])
        np.testing.assert_array_equal(values[row], logits[row, indices[row]])
