"""The hand-written CPU kernels, each against numpy, over shapes that do not divide evenly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import iree.runtime as iree
import jinja2
import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.build.compile import compile_text
from shortfin_apps.llm.build.graph_cpu import CpuForm
from shortfin_apps.llm.build.graph_generic import yield_as
from shortfin_apps.llm.build.graph_target import Target, resolve_target
from shortfin_apps.llm.build.graph_text import Emitter, Tensor, tensor_type
from shortfin_apps.llm.build.graph_topk import top_k as generic_top_k
from shortfin_apps.llm.build.graph_weights import WeightTypes
from shortfin_apps.llm.build.kernels import render
from shortfin_apps.llm.build.spec import BuildOptions, WeightType
from shortfin_apps.llm.host_cpu import permit_amx
from tests.build.compiled_model import DTYPES, TINY

F32 = npt.NDArray[np.float32]
Run = Callable[..., list[Any]]

# 130 rows cross a row block, the others take every kind of tail.
ROWS = [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 130]
TYPES: list[WeightType] = ["bf16", "f16", "f32"]
MATMUL_TOLERANCE = {"bf16": 2e-2, "f16": 2e-3, "f32": 1e-5}
HOST = resolve_target("cpu")
# The same CPU without the bf16 dot and wide registers: the tiles that smaller machines get.
NARROW = replace(HOST, features=frozenset({"avx2", "fma"}))


@dataclass(frozen=True)
class Sizes:
    hidden: int
    ffn: int
    out: int


UNEVEN = Sizes(hidden=80, ffn=112, out=48)  # 48 and 80 leave half a panel
WHOLE_TILES = Sizes(hidden=96, ffn=160, out=64)  # what the matrix unit takes


class ConstantWeights(WeightTypes):
    """Weights that stand in the module instead of a parameter archive."""

    def __init__(self, arrays: dict[str, npt.NDArray[Any]], dtypes: dict[str, str]) -> None:
        self._arrays = arrays
        self._types = {name: (array.shape, dtypes[name]) for name, array in arrays.items()}

    def declarations(self) -> list[str]:
        return [
            f'util.global private @"{name}" = dense<"0x{array.tobytes().hex().upper()}"> : '
            f"{tensor_type(*self._types[name])}"
            for name, array in self._arrays.items()
        ]


def load(text: str, folder: Path) -> Any:
    compile_text(text, HOST.flags, folder / "kernel.vmfb")
    permit_amx()
    config = iree.Config("local-sync")
    module = iree.VmModule.copy_buffer(config.vm_instance, (folder / "kernel.vmfb").read_bytes())
    return iree.load_vm_module(module, config)


def function(name: str, inputs: dict[str, tuple[int | str, ...]], body: Callable[..., list[Tensor]]) -> str:
    """A function over f32 tensors (a dimension of "?" is dynamic) that returns what `body` emits."""
    e = Emitter()
    tensors = []
    for arg, shape in inputs.items():
        kind = tensor_type(shape, "f32")
        dims = [
            d if isinstance(d, int) else e.value(f"tensor.dim %arg_{arg}, {e.constant(i)} : {kind}")
            for i, d in enumerate(shape)
        ]
        tensors.append(Tensor(f"%arg_{arg}", tuple(dims), "f32"))
    results = body(e, *tensors)
    arguments = ", ".join(f"%arg_{arg}: {tensor_type(shape, 'f32')}" for arg, shape in inputs.items())
    types = ", ".join(t.type for t in results)
    lines = "\n".join(e.lines)
    returned = ", ".join(t.name for t in results)
    return f"func.func @{name}({arguments}) -> ({types}) {{\n{lines}\nreturn {returned} : {types}\n}}"


def narrow(e: Emitter, x: Tensor, dtype: str) -> Tensor:
    return e.elementwise("td", ("td", x.shape, dtype), [(x, "td")], yield_as("%a", dtype))


def widen(e: Emitter, x: Tensor) -> Tensor:
    body = (
        "  linalg.yield %a : f32"
        if x.dtype == "f32"
        else f"  %w = arith.extf %a : {x.dtype} to f32\n  linalg.yield %w : f32"
    )
    return e.elementwise("td", ("td", x.shape, "f32"), [(x, "td")], body)


@cache
def matmul_weights(kind: WeightType, sizes: Sizes) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(0)
    shapes = {
        "plain.w": (sizes.out, sizes.hidden),
        "residual.w": (sizes.hidden, sizes.ffn),
        "gated.w": (2 * sizes.ffn, sizes.hidden),
        "norm.w": (sizes.hidden,),
    }
    return {
        name: rng.standard_normal(shape)
        .astype(np.float32)
        .astype(DTYPES["f32" if name == "norm.w" else kind])
        for name, shape in shapes.items()
    }


@dataclass(frozen=True)
class LinearKernels:
    kind: WeightType
    sizes: Sizes
    module: Any

    @classmethod
    def build(cls, kind: WeightType, target: Target, sizes: Sizes, folder: Path) -> LinearKernels:
        spec = replace(TINY, hidden_size=sizes.hidden, intermediate_size=sizes.ffn)
        arrays = matmul_weights(kind, sizes)
        weights = ConstantWeights(arrays, {name: "f32" if name == "norm.w" else kind for name in arrays})
        form = CpuForm(spec, BuildOptions(weights=kind), target, weights)
        x: dict[str, tuple[int | str, ...]] = {"x": ("?", sizes.hidden)}
        h: dict[str, tuple[int | str, ...]] = {"h": ("?", sizes.ffn), "r": ("?", sizes.hidden)}
        functions = [
            function("plain", x, lambda e, x: [form.linear(e, narrow(e, x, kind), "plain.w")]),
            function("residual", h, lambda e, h, r: [form.linear(e, narrow(e, h, kind), "residual.w", r)]),
            function(
                "gated", x, lambda e, x: [widen(e, form.gated_linear(e, narrow(e, x, kind), "gated.w"))]
            ),
            function("norm", x, lambda e, x: [widen(e, form.rms_norm(e, x, "norm.w"))]),
        ]
        text = "\n".join(
            ["module @kernels {", *weights.declarations(), *form.declarations(), *functions, "}"]
        )
        return cls(kind, sizes, load(text, folder))

    def activations(self, rng: np.random.Generator, rows: int, width: int) -> F32:
        return rng.standard_normal((rows, width)).astype(DTYPES[self.kind]).astype(np.float32)


CASES: list[tuple[WeightType, Target, Sizes]] = [
    *((kind, target, UNEVEN) for kind in TYPES for target in (HOST, NARROW)),
    ("bf16", HOST, WHOLE_TILES),
]


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=lambda c: f"{c[0]}-{'host' if c[1] is HOST else 'narrow'}-{'uneven' if c[2] is UNEVEN else 'tiles'}",
)
def linear(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LinearKernels:
    kind, target, sizes = request.param
    return LinearKernels.build(kind, target, sizes, tmp_path_factory.mktemp("linear"))


@pytest.mark.parametrize("rows", ROWS)
def test_linear_kernels(linear: LinearKernels, rows: int) -> None:
    kind, sizes, module = linear.kind, linear.sizes, linear.module
    weights = {name: array.astype(np.float32) for name, array in matmul_weights(kind, sizes).items()}
    rng = np.random.default_rng(rows)

    def check(actual: Any, expected: F32) -> None:
        scale = np.abs(expected).max()
        np.testing.assert_allclose(
            actual.to_host() / scale, expected / scale, rtol=0, atol=MATMUL_TOLERANCE[kind]
        )

    x, h = linear.activations(rng, rows, sizes.hidden), linear.activations(rng, rows, sizes.ffn)
    r = linear.activations(rng, rows, sizes.hidden)
    check(module.plain(x), x @ weights["plain.w"].T)
    check(module.residual(h, r), r + h @ weights["residual.w"].T)
    gate, up = np.split(x @ weights["gated.w"].T, 2, axis=1)
    check(module.gated(x), gate / (1 + np.exp(-gate)) * up)
    check(module.norm(x), x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-5) * weights["norm.w"])


def test_a_row_is_the_same_to_the_bit_whatever_rows_are_beside_it(linear: LinearKernels) -> None:
    rng = np.random.default_rng(1)
    h = linear.activations(rng, ROWS[-1], linear.sizes.ffn)
    x = linear.activations(rng, ROWS[-1], linear.sizes.hidden)
    module = linear.module

    def compute(rows: int) -> list[F32]:
        results = (module.plain(x[:rows]), module.residual(h[:rows], x[:rows]), module.gated(x[:rows]))
        return [result.to_host() for result in results]

    everything = compute(ROWS[-1])
    for rows in ROWS:
        for part, whole in zip(compute(rows), everything, strict=True):
            np.testing.assert_array_equal(part, whole[:rows])


TOP_K_SHAPES = [(512, 1), (512, 64), (1000, 7), (96, 96), (49152, 64)]


@pytest.fixture(scope="module")
def top_k_kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For every shape a function of the kernel and one of the generic form."""
    functions, declarations = [], []
    for size, k in TOP_K_SHAPES:
        form = CpuForm(TINY, BuildOptions(top_k=k), HOST, ConstantWeights({}, {}))
        x: dict[str, tuple[int | str, ...]] = {"x": (3, size)}
        functions.append(function(f"kernel_{size}_{k}", x, lambda e, x, f=form: list(f.top_k(e, x))))
        functions.append(function(f"generic_{size}_{k}", x, lambda e, x, k=k: list(generic_top_k(e, x, k))))
        declarations += form.declarations()
    text = "\n".join(["module @kernels {", *declarations, *functions, "}"])
    return load(text, tmp_path_factory.mktemp("top_k"))


@pytest.mark.parametrize("distinct", [3, 40, 1 << 30], ids=["many-ties", "some-ties", "no-ties"])
@pytest.mark.parametrize("form", ["kernel", "generic"])
@pytest.mark.parametrize(("size", "k"), TOP_K_SHAPES)
def test_top_k(top_k_kernels: Any, form: str, size: int, k: int, distinct: int) -> None:
    rng = np.random.default_rng(size + k)
    logits = (rng.integers(0, distinct, (3, size)) - distinct // 2).astype(np.float32)
    logits[1, size // 2 :] = -np.inf if size // 2 >= k else logits[1, size // 2 :]
    values, indices = (r.to_host() for r in getattr(top_k_kernels, f"{form}_{size}_{k}")(logits))
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, axis=1))


def test_top_k_of_nan_still_names_tokens(top_k_kernels: Any) -> None:
    logits = np.full((3, 512), np.nan, np.float32)
    logits[0, 77] = 1.0
    _, indices = top_k_kernels.kernel_512_64(logits)
    assert indices.to_host()[0, 0] == 77
    assert ((indices.to_host() >= 0) & (indices.to_host() < 512)).all()


def test_an_unknown_parameter_of_a_template_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        render("top_k", "top_k", size=64)
