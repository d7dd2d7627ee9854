from __future__ import annotations

import json

import pytest
from pydantic import TypeAdapter, ValidationError

from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.rope import Rope
from shortfin_apps.llm.model.spec import ModelSpec
from tests.builder.compiled_model import OTHERS, ROUTED, TINY
from tests.builder.hybrid_model import MIXED

SPECS = {"tiny": TINY, "routed": ROUTED, "mixed": MIXED, **OTHERS}
IN_FILES = TypeAdapter(ModelSpec)


@pytest.mark.parametrize("name", SPECS)
def test_a_file_keeps_every_block_and_names_its_kind(name: str) -> None:
    text = IN_FILES.dump_json(SPECS[name])
    assert IN_FILES.validate_json(text) == SPECS[name]
    named = [[block["block"] for block in layer] for layer in json.loads(text)["layers"]]
    assert named == [[type(block).__name__ for block in layer] for layer in SPECS[name].layers]


def test_a_file_with_an_unknown_kind_of_block_is_refused() -> None:
    text = IN_FILES.dump_json(TINY).replace(b'"MLP"', b'"Perceptron"')
    with pytest.raises(ValidationError, match="Perceptron"):
        IN_FILES.validate_json(text)


@pytest.mark.parametrize(("context", "window"), [(37, None), (36, None), (38, 37)])
def test_a_window_that_the_context_fits_in_is_dropped(context: int, window: int | None) -> None:
    block = Attention(heads=4, kv_heads=2, head_dim=16, rope=Rope(), window=37)
    assert block.within(context).window == window
    assert TINY.blocks[1].within(context) is TINY.blocks[1]


@pytest.mark.parametrize(("context", "is_scaled"), [(20, False), (21, True)])
def test_queries_are_not_scaled_within_the_first_period(context: int, is_scaled: bool) -> None:
    [block] = OTHERS["scaled"].blocks_of(Attention)
    assert (block.within(context).query_scaling is not None) is is_scaled
    assert block.query_scaling is not None
    assert bool(block.query_scaling.factors(0, context).max() > 1) is is_scaled
