"""The hand-written CPU kernels, each against numpy, over shapes that do not divide evenly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import iree.runtime as iree
import jinja2
import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor, tensor_type
from shortfin_apps.llm.builder.kernels import render
from shortfin_apps.llm.builder.lowering.cpu.matmul import VectorOperations
from shortfin_apps.llm.builder.lowering.cpu.top_k import VectorTopK
from shortfin_apps.llm.builder.lowering.linalg.operations import yield_as
from shortfin_apps.llm.builder.lowering.linalg.top_k import top_k as generic_top_k
from shortfin_apps.llm.builder.lowering.lowering import RenderedKernels
from shortfin_apps.llm.builder.model.spec import BuildOptions, FloatType, LlamaSpec, WeightType
from shortfin_apps.llm.builder.program.compiler import compile_text
from shortfin_apps.llm.builder.quantise import Blocks, quantise, quantise_rows
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.builder.weights.layout import Int8Panels, WeightLayout, weight_layout
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.host_cpu import permit_amx
from tests.builder.compiled_model import DTYPES, TINY
from tests.kernel_families import note_executed

F32 = npt.NDArray[np.float32]
Inputs = dict[str, tuple[int | str, ...]]

# 130 rows cross a row block, the others take every kind of tail.
ROWS = [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 130]
FLOATS = get_args(FloatType)
WIDENED: list[WeightType] = [kind for kind in get_args(WeightType) if kind != "int8"]
MATMUL_TOLERANCE = {"bf16": 2e-2, "f16": 2e-3, "f32": 1e-5}
HOST = resolve_target("cpu")
# The same CPU without the bf16 dot and wide registers: the tiles that smaller machines get.
NARROW = replace(HOST, features=frozenset({"avx2", "fma"}))
NO_TILES = replace(HOST, features=frozenset(f for f in HOST.features if not f.startswith("amx")))
NAMES = {NARROW.features: "narrow", NO_TILES.features: "no-tiles", HOST.features: "host"}


@dataclass(frozen=True)
class Sizes:
    hidden: int
    ffn: int
    out: int


UNEVEN = Sizes(hidden=80, ffn=112, out=48)  # 48 and 80 leave half a panel
WHOLE_TILES = Sizes(hidden=96, ffn=160, out=64)  # what the matrix unit takes


class ConstantWeights(WeightTypes):
    """Weights that stand in the module instead of a parameter archive; `values` is what they are worth."""

    def __init__(self, weights: dict[str, F32], layouts: dict[str, WeightLayout]) -> None:
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        self._layouts = layouts
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self.values: dict[str, F32] = {}
        for name, weight in weights.items():
            layout = layouts[name]
            value: Blocks | npt.NDArray[Any]
            if isinstance(layout, Int8Panels):
                value = weight
                quants, scales = quantise_rows(weight)
                self.values[name] = quants * scales[:, None]
            elif layout.bits is None:
                value = weight.astype(DTYPES[layout.stored(name, weight.shape)[name][1]])
                self.values[name] = value.astype(np.float32)
            else:
                value = quantise(weight, layout.bits)
                self.values[name] = value.dequantise()
            self._arrays |= zip(layout.stored(name, weight.shape), layout.store(value), strict=True)

    def declarations(self) -> list[str]:
        types = {
            parameter: tensor_type(*kind)
            for name, layout in self._layouts.items()
            for parameter, kind in layout.stored(name, self._shapes[name]).items()
        }
        return [
            f'util.global private @"{name}" = dense<"0x{array.tobytes().hex().upper()}"> : {types[name]}'
            for name, array in self._arrays.items()
        ]


def load(text: str, folder: Path) -> Any:
    compile_text(text, HOST.flags, folder / "kernel.vmfb")
    permit_amx()
    config = iree.Config("local-sync")
    module = iree.VmModule.copy_buffer(config.vm_instance, (folder / "kernel.vmfb").read_bytes())
    note_executed(text, HOST.architecture)
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


def matmul_weights(spec: LlamaSpec, options: BuildOptions, target: Target, sizes: Sizes) -> ConstantWeights:
    rng = np.random.default_rng(0)
    shapes = {
        "blk.0.attn_qkv.weight": (sizes.out, sizes.hidden),
        "blk.0.ffn_down.weight": (sizes.hidden, sizes.ffn),
        "blk.0.ffn_gate_up.weight": (2 * sizes.ffn, sizes.hidden),
        "blk.0.ffn_norm.weight": (sizes.hidden,),
    }
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return ConstantWeights(weights, {name: weight_layout(name, spec, options, target) for name in shapes})


@dataclass(frozen=True)
class LinearKernels:
    options: BuildOptions
    sizes: Sizes
    weights: ConstantWeights
    module: Any

    @classmethod
    def build(cls, kind: WeightType, target: Target, sizes: Sizes, folder: Path) -> LinearKernels:
        options = BuildOptions(weights=kind)
        spec = replace(TINY, hidden_size=sizes.hidden, intermediate_size=sizes.ffn, vocab_size=sizes.out)
        weights = matmul_weights(spec, options, target, sizes)
        rendered = RenderedKernels()
        operations = VectorOperations(spec, options, target, weights, rendered.render)
        act = options.activations
        x: Inputs = {"x": ("?", sizes.hidden)}
        h: Inputs = {"h": ("?", sizes.ffn), "r": ("?", sizes.hidden)}

        def gated(e: Emitter, x: Tensor) -> list[Tensor]:
            return [widen(e, operations.gated_linear(e, narrow(e, x, act), "blk.0.ffn_gate_up.weight"))]

        functions = [
            function(
                "plain", x, lambda e, x: [operations.linear(e, narrow(e, x, act), "blk.0.attn_qkv.weight")]
            ),
            function(
                "residual",
                h,
                lambda e, h, r: [operations.linear(e, narrow(e, h, act), "blk.0.ffn_down.weight", r)],
            ),
            function("gated", x, gated),
            function("norm", x, lambda e, x: [widen(e, operations.rms_norm(e, x, "blk.0.ffn_norm.weight"))]),
        ]
        text = "\n".join(
            ["module @kernels {", *weights.declarations(), *rendered.texts.values(), *functions, "}"]
        )
        return cls(options, sizes, weights, load(text, folder))

    def activations(self, rng: np.random.Generator, rows: int, width: int) -> F32:
        return rng.standard_normal((rows, width)).astype(DTYPES[self.options.activations]).astype(np.float32)


CASES: list[tuple[WeightType, Target, Sizes]] = [
    *((kind, target, UNEVEN) for kind in FLOATS for target in (HOST, NARROW)),
    *((kind, target, WHOLE_TILES) for kind in WIDENED for target in (NO_TILES, NARROW)),
]


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=lambda c: f"{c[0]}-{NAMES[c[1].features]}-{'uneven' if c[2] is UNEVEN else 'tiles'}",
)
def linear(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LinearKernels:
    kind, target, sizes = request.param
    return LinearKernels.build(kind, target, sizes, tmp_path_factory.mktemp("linear"))


@pytest.mark.parametrize("rows", ROWS)
def test_linear_kernels(linear: LinearKernels, rows: int) -> None:
    sizes, module, weights = linear.sizes, linear.module, linear.weights.values
    rng = np.random.default_rng(rows)

    def check(actual: Any, expected: F32) -> None:
        scale = np.abs(expected).max()
        tolerance = MATMUL_TOLERANCE[linear.options.activations]
        np.testing.assert_allclose(actual.to_host() / scale, expected / scale, rtol=0, atol=tolerance)

    x, h = linear.activations(rng, rows, sizes.hidden), linear.activations(rng, rows, sizes.ffn)
    r = linear.activations(rng, rows, sizes.hidden)
    check(module.plain(x), x @ weights["blk.0.attn_qkv.weight"].T)
    check(module.residual(h, r), r + h @ weights["blk.0.ffn_down.weight"].T)
    gate, up = np.split(x @ weights["blk.0.ffn_gate_up.weight"].T, 2, axis=1)
    check(module.gated(x), gate / (1 + np.exp(-gate)) * up)
    inverse = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-5)
    check(module.norm(x), x * inverse * weights["blk.0.ffn_norm.weight"])


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
    functions: list[str] = []
    declarations: list[str] = []
    for size, k in TOP_K_SHAPES:
        rendered = RenderedKernels()
        kernel = VectorTopK(BuildOptions(top_k=k), rendered.render)
        x: dict[str, tuple[int | str, ...]] = {"x": (3, size)}
        functions.append(function(f"kernel_{size}_{k}", x, lambda e, x, f=kernel: list(f.top_k(e, x))))
        functions.append(function(f"generic_{size}_{k}", x, lambda e, x, k=k: list(generic_top_k(e, x, k))))
        declarations += rendered.texts.values()
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


@pytest.mark.parametrize("place", [0, 0.03, 0.5, 0.999])
@pytest.mark.parametrize("form", ["kernel", "generic"])
@pytest.mark.parametrize(("size", "k"), TOP_K_SHAPES)
def test_top_k_says_which_rows_hold_nan(
    top_k_kernels: Any, form: str, size: int, k: int, place: float
) -> None:
    """Wherever it stands, and though it is not the best: who samples sees no more of the row than this."""
    logits = np.random.default_rng(size).standard_normal((3, size)).astype(np.float32)
    logits[1, int(place * size)] = np.nan
    values, indices = (r.to_host() for r in getattr(top_k_kernels, f"{form}_{size}_{k}")(logits))
    assert np.isnan(values[1]).all()
    assert ((indices >= 0) & (indices < size)).all()
    for row in (0, 2):
        np.testing.assert_array_equal(indices[row], np.argsort(-logits[row], kind="stable")[:k])
        np.testing.assert_array_equal(values[row], logits[row, indices[row]])


def test_an_unknown_parameter_of_a_template_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        render("cpu/top_k", "top_k", size=64)
