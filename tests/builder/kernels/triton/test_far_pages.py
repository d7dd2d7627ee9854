"""Pages behind the first 2^31 elements of a KV cache are written and read where they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shortfin_apps.llm.builder.graph.batch import Batch, Slab
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.lowering import Lowering, RenderedKernels, Values
from shortfin_apps.llm.model.attention import Attend
from shortfin_apps.llm.model.operations import Linear
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_model import TINY
from tests.builder.kernels.triton.conftest import Launch, context_of
from tests.builder.kernels.triton.given_weights import GivenWeights
from tests.builder.kernels.triton.launched import Inputs, Launched
from tests.builder.specs import page_elements
from tests.hip import EmulatedGpus
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton.layers import TritonLayers

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(300)]

LAYER = 1
PAGES = 2  # that there are
LENGTHS = np.array([1, 3])  # tokens of packed rows: each kernel of attention has one
PAGE_ELEMENTS = page_elements(TINY, BuildOptions())


def compiled(chip: str, launch: Launch) -> Launched:
    """A layer's projection and attention."""
    context = context_of(TINY, chip, BuildOptions(device=f"hip:{chip}", weights="bf16", kv="bf16"))
    inputs: Inputs = {
        "x": ("bf16", ("tokens", TINY.hidden_size)),
        "w": ("bf16", (TINY.attention.qkv_features, TINY.hidden_size)),
        **{name: ("i64", (len(LENGTHS),)) for name in ("given_offsets", "starts", "seq_lens")},
        "blocks": ("i64", (len(LENGTHS), 1)),
        "cache": ("bf16", (PAGES, PAGE_ELEMENTS)),
    }

    def body(e: Emitter, given: dict[str, Tensor]) -> list[Tensor]:
        names = ("given_offsets", "starts", "seq_lens")
        batch = Batch(
            rows=len(LENGTHS),
            tokens=given["x"].shape[0],
            chunk=None,
            whole_pages=False,
            **{name: given[name] for name in names},
            slabs=[
                Slab(
                    pool="whole", layers=range(len(TINY.layers)), blocks=given["blocks"], cache=given["cache"]
                )
            ],
        )
        layers = TritonLayers(replace(context, weights=GivenWeights(given)))
        layers.prepare(e, batch)
        values = Values({"x": given["x"]}, batch)
        run = [Linear("x", "qkv", "w"), Attend("qkv", "out", LAYER, TINY.attention)]
        Lowering({}, RenderedKernels(), layers).lower(e, run, values, ["out"])
        return [values["out"]]

    return launch(inputs, body, context)


def test_addresses_of_far_pages(chip: str, launch: Launch, emulated_gpus: EmulatedGpus) -> None:
    """The cache is too small for the pages, so that the GPU tells where each instruction looked for them."""
    program = compiled(chip, launch)
    control = emulated_gpus.control
    rng = np.random.default_rng(1)

    def accessed(page: int) -> dict[tuple[str, int], int]:
        """By kernel and instruction, the first address outside of the cache."""
        control.clear_report()
        program(
            x=rng.standard_normal((LENGTHS.sum(), TINY.hidden_size)),
            w=rng.standard_normal((TINY.attention.qkv_features, TINY.hidden_size)),
            given_offsets=np.cumsum(LENGTHS) - LENGTHS,
            starts=np.zeros(len(LENGTHS)),
            seq_lens=LENGTHS,
            blocks=np.full((len(LENGTHS), 1), page),
            cache=np.zeros((PAGES, PAGE_ELEMENTS)),
        )
        found = [f for f in control.report().findings if f.kind == "outside_memory"]
        control.clear_report()
        return {(f.kernel, f.code_address): f.address for f in found}

    half = (1 << 31) // PAGE_ELEMENTS  # pages of so many elements
    some, more = half + 5, 5 * half + 9
    first, second = accessed(some), accessed(more)
    assert first.keys() == second.keys()
    for name in ("project_qkv", "attend_several", "attend_singles"):
        assert any(kernel.startswith(name) for kernel, _ in first), f"{name} has no instruction that looked"
    page_bytes = 2 * PAGE_ELEMENTS
    for instruction, address in first.items():
        apart = second[instruction] - address
        assert abs(apart - (more - some) * page_bytes) < page_bytes, instruction
