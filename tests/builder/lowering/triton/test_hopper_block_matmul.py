"""The choice of the form for Hopper of a matmul with weights in blocks, and what a model then launches."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from shortfin_apps.llm.builder.graph.emitter import Bounded, Dim
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles
from shortfin_apps.llm.builder.program.module import ModelModule
from shortfin_apps.llm.builder.weights.chosen_layout import block_rows
from shortfin_apps.llm.builder.weights.layout import BlockRows
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.model.weight_blocks import MXFP4, Q4_1, Q8_0, BlockType
from tests.builder.lowering.triton.test_hopper_matmul import (
    DOWN,
    HOPPER,
    LLAMA,
    gate_up,
    linear,
    qkv,
    qkv_in_bytes,
)
from tests.builder.specs import changed
from tests.builder.uncompiled import no_code

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.kernels.triton import hopper_block_matmul
from shortfin_apps.llm.builder.lowering.triton.hopper_block_matmul import block_form, block_tile
from shortfin_apps.llm.builder.lowering.triton.hopper_matmul import hopper_form

TYPES = (Q4_1, Q8_0, BlockType(4, has_minima=True, group=256), BlockType(8, 16, group=256))


def stored(blocks: BlockType) -> BlockRows:
    return block_rows(blocks, "bf16", HOPPER)


Q4 = stored(Q4_1)


def tokens_per_tile(kernel: Kernel, tokens: Dim) -> int | None:
    tile = block_tile(kernel, tokens)
    return None if tile is None else tile.tokens


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (32, [None, None, None, None]),
        (64, [64, None, 64, None]),
        (65, [64, 64, 128, 64]),
        (128, [64, 64, 128, 64]),
        (256, [128, 64, 128, 64]),
        (320, [64, 128, 64, 128]),
        (512, [64, 128, 128, 128]),
        (2047, [128, 128, 128, 128]),
        (2048, [None, None, None, None]),
        ("%tokens", [128, 128, 128, 128]),
    ],
)
@pytest.mark.parametrize("blocks", TYPES, ids=str)
def test_the_form_is_used_where_it_was_faster(
    blocks: BlockType, tokens: Dim, expected: list[int | None]
) -> None:
    layout = stored(blocks)
    kernels = [qkv(tokens, layout), linear(tokens, layout), gate_up(tokens, layout)]
    kernels += [linear(tokens, layout, shape=DOWN)]
    assert [tokens_per_tile(kernel, tokens) for kernel in kernels] == expected


@pytest.mark.parametrize("blocks", TYPES, ids=str)
def test_k_is_that_of_the_weight_not_of_its_bytes(blocks: BlockType) -> None:
    """As in Qwen2.5 7B and Gemma 3 12B, where K is an odd multiple of four and of two steps."""
    for features in (7 * 512, 15 * 256):
        assert tokens_per_tile(linear(512, stored(blocks), shape=(8192, features)), 512) == 128


REFUSED: Mapping[str, Kernel] = {
    "rows that do not fill tiles": linear(512, Q4, shape=(8192 + 64, 4096)),
    "K that two steps do not fill": linear(512, Q4, shape=(8192, 4096 + 128)),
    "scales in f16": linear(512, BlockRows(Q4_1)),
    "floats of 4 bits": linear(512, stored(MXFP4)),
    "small blocks with minima": linear(512, stored(BlockType(8, 16, has_minima=True, group=256))),
    "weights that are not in blocks": linear(512),
    "heads of another size": qkv(512, Q4, spec={"heads": 64, "kv_heads": 16, "head_dim": 64}),
}


@pytest.mark.parametrize("kernel", REFUSED.values(), ids=REFUSED.keys())
def test_what_the_form_does_not_compute_stays_with_the_other_kernel(kernel: Kernel) -> None:
    assert block_form(kernel, 512) is kernel


@pytest.mark.parametrize("tokens", [None, 32, Bounded("%rows", 256)])
def test_few_tokens_stay_with_the_other_kernel(tokens: Dim | None) -> None:
    kernel = gate_up(512, Q4)
    assert block_form(kernel, tokens) is kernel


@pytest.mark.parametrize("blocks", TYPES, ids=str)
def test_the_form_has_the_operands_of_the_other_kernel_and_a_scratch(blocks: BlockType) -> None:
    layout = stored(blocks)
    for kernel in (
        qkv(512, layout),
        qkv(512, layout, absent="head_norm"),
        qkv(512, layout, absent="bias"),
        qkv_in_bytes(512, layout),
        linear(512, layout),
        gate_up(512, layout),
        gate_up(512, layout, activation="gelu"),
    ):
        assert hopper_form(kernel, 512) is kernel
        made = block_form(kernel, 512)
        forms = hopper_block_matmul.linear, hopper_block_matmul.gated_linear, hopper_block_matmul.project_qkv
        assert made.function in forms
        [scratch] = made.interface.buffers.items() - kernel.interface.buffers.items()
        assert scratch[0] == list(made.interface.buffers)[-1] == "scratch"
        assert kernel.interface.buffers.items() < made.interface.buffers.items()
        given = {*made.interface.buffers, *made.interface.constants, *made.constexprs}
        assert given == set(made.function.arg_names)


def test_there_are_as_many_workgroups_as_tiles_or_multiprocessors() -> None:
    assert block_form(gate_up(64, Q4), 64).grid == [Tiles("tokens", 64, times=224, most=132)]
    assert block_form(linear(512, Q4), 512).grid == [Tiles("tokens", 128, times=32, most=132)]


def test_a_weight_is_widened_before_only_where_the_form_does_not_read_it() -> None:
    """Llama's matmuls read blocks themselves; with heads of 256, the projection's weight is widened."""
    for is_wide in (False, True):
        heads = {"heads": 16, "kv_heads": 4, "head_dim": 256} if is_wide else {}
        spec = changed(LLAMA, {"features": 14336, **heads})
        options = BuildOptions(
            device="cuda:sm_90", weights="q4", prefill_batch_sizes=(1,), decode_batch_sizes=(1,)
        )
        text = ModelModule(spec, options, HOPPER, no_code).text()
        prefill = text.split("util.func public @prefill_bs1$")[1].split("util.func public @")[0]
        launched = re.findall(r"flow\.dispatch @(\w+)::", prefill)
        assert any("linear" in name and "_hopper_128x128" in name for name in launched)
        assert [name for name in launched if name.startswith("widen_") and "6144x4096" not in name] == []
        assert any(name.startswith("widen_") for name in launched) is is_wide
