"""The choice of the form in Gluon of attention over a cache in bytes."""

from __future__ import annotations

from typing import Any

import pytest

from bench.whole_slab import whole_slab
from shortfin_apps.llm.builder.graph.emitter import Bounded, Dim
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tuning
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_model import TINY
from tests.builder.specs import changed

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.kernels.triton import byte_attention
from shortfin_apps.llm.builder.lowering.triton.attention_kernels import AttentionKernels
from shortfin_apps.llm.builder.lowering.triton.byte_attention import byte_form
from shortfin_apps.llm.builder.lowering.triton.tiles import FEW_ROWS, tiles_of

HOPPER = Target("cuda:sm_90", (), "nvptx", "sm_90", frozenset())
LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128}


def singles(absent: str = "sinks offsets", rows: Dim = 64, kv: str = "q8_0", **given: Any) -> Kernel:
    """Attention of single tokens, by Triton; `given` are changes of the shape, or of the options."""
    fields = {name: given.pop(name) for name in list(given) if name in BuildOptions.__dataclass_fields__}
    spec = changed(TINY, {**LLAMA, **given})
    options = BuildOptions(device="cuda:sm_90", kv=kv, **fields)  # type: ignore[arg-type]
    kernels = AttentionKernels(spec, spec.attention, options, tiles_of(HOPPER).for_rows(rows))
    return kernels.attend_singles(whole_slab(spec, options)).without(set(absent.split()))


def has_form(kernel: Kernel, rows: Dim | None = 64) -> bool:
    made = byte_form(kernel, rows)
    assert made is kernel or made.function is byte_attention.attend_singles
    return made is not kernel


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, False),
        (FEW_ROWS, False),
        (FEW_ROWS + 1, True),
        ("rows", True),
        (Bounded("rows", FEW_ROWS), False),
        (Bounded("rows", 512), True),
        (None, False),
    ],
)
def test_only_batches_that_may_have_many_rows_have_the_form(rows: Dim | None, *, expected: bool) -> None:
    assert has_form(singles(), rows) is expected


@pytest.mark.parametrize(
    "given",
    [
        {"kv": "bf16"},
        {"head_dim": 64},
        {"window": 128},
        {"cap": 30.0},
        {"sinks": True, "absent": "offsets"},
        {"heads": 32, "kv_heads": 1},
        {"block_seq_stride": 32},
        {"weights": "f32"},  # queries in f32 would lose bits
    ],
    ids=str,
)
def test_other_attention_keeps_its_kernel(given: dict[str, Any]) -> None:
    assert not has_form(singles(**given))


def test_other_kernels_are_kept() -> None:
    spec, options = changed(TINY, LLAMA), BuildOptions(device="cuda:sm_90", kv="q8_0")
    kernels = AttentionKernels(spec, spec.attention, options, tiles_of(HOPPER))
    assert not has_form(kernels.attend(False, whole_slab(spec, options)).without({"sinks"}))


@pytest.mark.parametrize("absent", ["sinks", "sinks offsets"])
def test_the_form_has_the_operands_and_the_grid_of_the_kernel(absent: str) -> None:
    kernel = singles(absent)
    form = byte_form(kernel, 64)
    assert form.interface == kernel.interface
    assert form.grid == kernel.grid
    assert form.name == kernel.name.replace("singles", "bytes")
    assert form.tuning == Tuning(num_waves=1)
    operands = {*form.interface.buffers, *form.interface.constants}
    assert {*operands, *form.constexprs} == set(byte_attention.attend_singles.arg_names)
