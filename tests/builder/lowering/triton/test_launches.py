"""What a model for a GPU launches: Triton's kernels alone, and no more of them than are needed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import CodeObject
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel
from shortfin_apps.llm.builder.program.module import ModelModule
from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, num_weights
from tests.builder.compiled_model import HYBRID, OTHERS, ROUTED, TINY
from tests.builder.specs import changed
from tests.builder.uncompiled import no_code, text_of

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton import one_launch as one_launch_module

LAYERS = len(TINY.layers)
HOPPER = Target("cuda:sm_90", (), "nvptx", "sm_90", frozenset())


@pytest.fixture(scope="module")
def functions() -> dict[str, str]:
    """The MLIR of each entry by its name."""
    options = BuildOptions(
        device="hip:gfx942", prefill_batch_sizes=(2,), decode_batch_sizes=(1, 4), chunk_sizes=(32,)
    )
    text = text_of(TINY, options)
    return {part[: part.index("$")]: part for part in text.split("util.func public @")[1:]}


@pytest.mark.parametrize(
    ("entry", "in_layer", "others"),
    [
        ("decode_bs1", 5, ["prepare", "embed"]),
        ("decode_bs4", 5, ["prepare", "embed"]),
        ("prefill_bs2", 5, ["prepare", "embed", "last_tokens"]),
        ("prefill_bs2_s32", 5, ["prepare", "embed", "last_tokens"]),
        ("extend", 6, ["prepare", "embed", "last_tokens"]),
    ],
)
def test_launches_in_addition_to_the_layers(
    entry: str, in_layer: int, others: list[str], functions: dict[str, str]
) -> None:
    launched = Counter(re.findall(r"flow\.dispatch @(\w+)::", functions[entry]))
    # One that reads tokens from the table.
    assert functions[entry].count("linalg.generic") == (entry == "extend")
    once = Counter(name.split("_without_")[0] for name, count in launched.items() if count < LAYERS)
    assert [name for name in others if not once[name]] == []
    top_k = sum(count for name, count in launched.items() if name.startswith("best_of"))
    head = 1
    assert launched.total() == in_layer * LAYERS + len(others) + head + top_k


def one_launch(target: Target) -> tuple[str, list[Kernel]]:
    """The program with decodes as one launch, and its kernels."""
    made: list[Kernel] = []

    def noted(kernels: Sequence[Kernel], architecture: str, chip: str) -> list[CodeObject]:
        made.extend(kernels)
        return no_code(kernels, architecture, chip)

    options = BuildOptions(
        device=target.device, prefill_batch_sizes=(1,), decode_batch_sizes=(4, 32), one_launch=True
    )
    return ModelModule(TINY, options, target, noted).text(), made


def test_a_decode_as_one_launch_is_between_the_preparation_and_the_best_tokens() -> None:
    text, _ = one_launch(resolve_target("hip:gfx942"))
    decode = text[text.index("@decode_bs4$") :].split("util.func public @")[0]
    launched = [name.split("_without_")[0] for name in re.findall(r"flow\.dispatch @(\w+)::", decode)]
    assert launched == ["prepare", "decode_layers_4", "best_of_chunks", "best_of_row"]
    # Addresses are stored when the program is loaded: of each layer's weights, of the last norm and the head.
    assert "store_addresses" not in decode
    [initialiser] = re.findall(r"^util\.initializer \{(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    assert initialiser.count("@store_addresses") == 2 * (6 * LAYERS + 2)  # as @name::@name


def one_launch_by_default(target: Target, **given: Any) -> bool:
    options = BuildOptions(device=target.device, prefill_batch_sizes=(1,), decode_batch_sizes=(4,), **given)
    return "decode_layers_4" in ModelModule(TINY, options, target, no_code).text()


def test_one_launch_is_the_default_only_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    ampere = replace(HOPPER, device="cuda:sm_80", cpu="sm_80")
    targets = [HOPPER, ampere, resolve_target("hip:gfx942")]
    assert [one_launch_by_default(target) for target in targets] == [True, False, False]
    assert not one_launch_by_default(HOPPER, one_launch=False)
    assert one_launch_by_default(ampere, one_launch=True)
    monkeypatch.setattr(one_launch_module, "MOST_WEIGHTS_OF_SMALL", num_weights(TINY) - 1)
    assert one_launch_by_default(HOPPER)
    assert one_launch_by_default(HOPPER, weights="fp8")
    assert not one_launch_by_default(HOPPER, weights="q4")
    assert one_launch_by_default(HOPPER, weights="q4", one_launch=True)
    monkeypatch.setattr(one_launch_module, "MOST_WEIGHTS", num_weights(TINY) - 1)
    assert not one_launch_by_default(HOPPER)
    assert one_launch_by_default(HOPPER, one_launch=True)


@pytest.mark.parametrize("target", [resolve_target("hip:gfx942"), HOPPER], ids=lambda target: target.cpu)
def test_decodes_of_few_rows_split_contexts_alike(target: Target) -> None:
    """Otherwise a row's bits would depend on the number of rows."""
    _, made = one_launch(target)
    slots = {"attend_singles": "COLUMNS", "decode_layers": "SLOTS"}
    found = {
        name: {
            (kernel.constexprs["SPLIT"], kernel.constexprs[constant])
            for kernel in made
            if kernel.name.startswith(name) and "offsets" not in kernel.interface.buffers
        }
        for name, constant in slots.items()
    }
    assert len(found["attend_singles"]) == 1
    assert found["attend_singles"] == found["decode_layers"]


@pytest.mark.parametrize(
    ("chip", "expected"), [("sm_90", {"decode_bs64", "extend", "extend_t512"}), ("sm_80", set())]
)
def test_entries_of_many_rows_read_a_cache_in_bytes_in_another_form(chip: str, expected: set[str]) -> None:
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 128}
    target = replace(HOPPER, device=f"cuda:{chip}", cpu=chip)
    options = BuildOptions(
        device=target.device,
        kv="q8_0",
        prefill_batch_sizes=(1,),
        decode_batch_sizes=(4, 64),
        decode_loop_sizes=(),
        extend_sizes=(32, 512),
    )
    text = ModelModule(changed(TINY, sizes), options, target, no_code).text()
    entries = {part[: part.index("$")]: part for part in text.split("util.func public @")[1:]}
    assert {"decode_bs4", "extend_t32", *expected} <= entries.keys()
    assert {name for name, entry in entries.items() if "@attend_bytes_" in entry} == expected


def test_a_layer_with_experts_takes_nine_launches() -> None:
    options = BuildOptions(device="hip:gfx942", prefill_batch_sizes=(1,), decode_batch_sizes=(4,))
    assert ROUTED.experts
    spec = changed(ROUTED, {"window": None, "biases": False})
    text = text_of(spec, options)
    decode = text[text.index("@decode_bs4$") :].split("util.func public @")[0]
    launched = [name.split("_without_")[0] for name in re.findall(r"flow\.dispatch @(\w+)::", decode)]
    first = next(place for place, name in enumerate(launched) if name.startswith("linear_7x"))
    names = [re.sub(r"_\d.*", "", name) for name in launched[first - 3 : first + 6]]
    assert names == [
        *("project_qkv", "attend_singles", "linear", "linear"),
        *("route", "sort_by_expert", "gated_experts", "multiply_experts", "sum_experts"),
    ]
    assert "linalg.generic" not in decode


def test_a_gated_delta_net_takes_four_launches_and_gated_attention_five() -> None:
    options = BuildOptions(device="hip:gfx942", prefill_batch_sizes=(1,), decode_batch_sizes=(4,))
    text = text_of(HYBRID, options)
    decode = text[text.index("@decode_bs4$") :].split("util.func public @")[0]
    launched = re.findall(r"flow\.dispatch @(\w+)::|(linalg\.generic)", decode)
    names = [re.sub(r"_(\d|without).*", "", kernel) or generic for kernel, generic in launched]
    feed_forward = ["gated_linear", "linear"]
    state = ["linear", "linear", "delta_rule", "linear"]
    attention = ["linear", "store_qkv", "attend_singles", "linalg.generic", "linear"]
    layers = [*state, *feed_forward, *attention, *feed_forward, *state, *feed_forward]
    assert names[: 2 + len(layers)] == ["prepare", "embed", *layers]


def test_sampling_takes_two_launches(functions: dict[str, str]) -> None:
    decode, loop, sample = (
        Counter(re.findall(r"flow\.dispatch @(\w+)::", functions[f"{family}_bs4"]))
        for family in ("decode", "decode_loop", "sample")
    )
    in_order = ["weigh_parts_without_row_indices", "draw_and_advance_without_counts_without_row_indices"]
    assert loop - decode == Counter(in_order)
    assert sample == Counter(["weigh_parts", "draw_without_counts"])


def test_logprobs_take_two_launches(functions: dict[str, str]) -> None:
    launched = re.findall(r"flow\.dispatch @(\w+)::", functions["logprobs_bs4"])
    assert launched == ["sum_parts", "write_terms"]


def test_adjusting_rows_takes_two_launches_and_a_search_for_the_best(functions: dict[str, str]) -> None:
    launched = re.findall(r"flow\.dispatch @(\w+)::", functions["adjusted_sample_bs4"])
    best = ["best_of_chunks", "best_of_row"]
    drawn = [f"{name}_without_row_indices" for name in ("weigh_parts", "draw_and_advance")]
    assert launched == ["adjust_rows", "edit_tokens", *best, *drawn]


@pytest.mark.parametrize("device", ["hip:gfx942", "hip:gfx1201"])
@pytest.mark.parametrize("spec", [HYBRID, ROUTED, *OTHERS.values()], ids=["hybrid", "routed", *OTHERS])
def test_all_that_a_layer_may_have_is_launched_and_nothing_else_is_there(
    spec: ModelSpec, device: str
) -> None:
    options = BuildOptions(device=device, prefill_batch_sizes=(1,), decode_batch_sizes=(4,))
    text = text_of(spec, options)
    launched = set(re.findall(r"flow\.dispatch @(\w+)::", text))
    executables = re.findall(r'"hal\.executable\.source"\(\) <\{sym_name = "(\w+)"', text)
    assert launched == set(executables)


def test_entries_of_many_tokens_launch_matmuls_that_load_by_tma_on_hopper() -> None:
    sizes = {"hidden_size": 2048, "heads": 16, "kv_heads": 4, "head_dim": 128, "features": 2048}
    options = BuildOptions(
        device="cuda:sm_90", prefill_batch_sizes=(1,), decode_batch_sizes=(4,), extend_sizes=(64, 256)
    )
    text = ModelModule(changed(TINY, sizes), options, HOPPER, no_code).text()
    entries = {part[: part.index("$")]: part for part in text.split("util.func public @")[1:]}
    launched = {name: len(re.findall(r"flow\.dispatch @\w+_hopper_", entries[name])) for name in entries}
    assert {name: count for name, count in launched.items() if count} == {
        "extend": 4 * LAYERS + 1,  # and the head, as the number of rows is not known
        "extend_t256": 4 * LAYERS,
        "prefill_bs1": 4 * LAYERS,
    }
