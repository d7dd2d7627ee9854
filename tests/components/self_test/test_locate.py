from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shortfin_apps.llm.builder.sources.random_tiny import SPEC
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.components.self_test.locate import deviation
from shortfin_apps.llm.model.kv_layout import KVType
from tests.compiled_programs import compile_program
from tests.components.self_test.compiled import OPTIONS, build_model, module_text, opened, with_vmfb

SMALL = replace(
    OPTIONS,
    prefill_batch_sizes=(1,),
    decode_batch_sizes=(1, 2),
    chunk_sizes=(),
    extend_sizes=(),
    decode_loop_sizes=(),
)
EXPONENT = 14  # the highest bit of a bf16's


@pytest.mark.parametrize("kv", ["bf16", "q8_0"])
def test_a_flipped_bit_of_a_weight_is_found_in_its_layer(kv: KVType, tmp_path: Path) -> None:
    """Of a layer's own keys; of its feed-forward, which the next layer's keys tell; and of the head."""
    options = replace(SMALL, kv=kv)
    keys = SPEC.attention.q_features * SPEC.hidden_size  # behind the queries, in whole panels
    flips = {
        ("blk.0.attn_qkv.weight", keys): 0,
        ("blk.0.ffn_down.weight", 0): 1,
        ("output.weight", 0): None,
    }
    for (name, begin), layer in flips.items():
        built = build_model(tmp_path, SPEC, options)
        for index in range(64):  # large weights all over
            built.flip(name, 2, begin + 7 * index, EXPONENT)
        with opened(built) as model:
            outcome = model.self_test.run()
            failures = outcome.failures(same_bits=True)
            assert len(failures) == len(outcome.entries), name
            location = model.locator().locate_first(failures, outcome)
        assert location is not None
        assert (location.layer, location.than) == (layer, "the reference"), name


def test_an_entry_that_computes_something_else_is_found_by_its_keys(tmp_path: Path) -> None:
    target = resolve_target("cpu")
    right = module_text(SPEC, SMALL, target)
    vmfb = compile_program(swapped(right, "decode_bs2"), target)
    with opened(with_vmfb(build_model(tmp_path, SPEC, SMALL), vmfb)) as model:
        outcome = model.self_test.run()
        failures = outcome.failures(same_bits=True)
        assert [each.entry for each in failures] == ["decode_bs2"]
        location = model.locator().locate_first(failures, outcome)
    assert location is not None
    assert location.layer == 0
    assert location.than in {f"`{entry}`" for entry in outcome.entries}


def swapped(text: str, entry: str) -> str:
    """The module, where that one entry takes the norms of two layers for each other."""
    begin = text.index(f"@{entry}$async")
    end = text.find("util.func public", begin)
    body = text[begin : end if end > 0 else len(text)]
    names = [f'@"blk.{layer}.attn_norm.weight"' for layer in range(2)]
    assert all(name in body for name in names)
    wrong = body.replace(names[0], "@").replace(names[1], names[0]).replace("@ :", f"{names[1]} :")
    return text.replace(body, wrong)


def test_sums_of_other_numbers_are_apart() -> None:
    assert deviation((3.0, 4.0), (3.0, 4.0)) == 0
    assert deviation((5.0, 4.0), (3.0, 4.0)) == 1  # two, of four elements of 1
    assert deviation((3.0, 8.0), (3.0, 4.0)) == 0.5
    assert not deviation((float("nan"), 4.0), (3.0, 4.0)) <= 1
