"""How GGUF files say that experts are scored."""

from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.sources.gguf_experts import expert_fields
from shortfin_apps.llm.contract.errors import BuildError


@pytest.mark.parametrize(
    ("keys", "names", "method"),
    [
        ({}, [], "greedy"),
        ({"expert_group_count": 1}, [], "greedy"),
        ({"expert_group_count": 8}, [], "group_limited_greedy"),
        ({"expert_group_count": 8}, ["blk.3.exp_probs_b.bias"], "noaux_tc"),
    ],
)
def test_a_bias_and_groups_say_how_experts_are_chosen(
    keys: dict[str, int], names: list[str], method: str
) -> None:
    assert expert_fields("x", keys, names)["topk_method"] == method


@pytest.mark.parametrize(("gating", "scores"), [(None, "softmax"), (1, "softmax"), (2, "sigmoid")])
def test_the_router_is_a_softmax_unless_the_file_says_otherwise(gating: int | None, scores: str) -> None:
    keys = {} if gating is None else {"expert_gating_func": gating}
    assert expert_fields("x", keys, [])["scoring_func"] == scores


def test_other_routers_are_refused() -> None:
    with pytest.raises(BuildError, match="a router of kind 3"):
        expert_fields("x", {"expert_gating_func": 3}, [])
