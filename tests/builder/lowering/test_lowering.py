"""How a model's operations are split into what is emitted together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering import lowering
from shortfin_apps.llm.builder.lowering.lowering import Lowering, RenderedKernels, Values
from shortfin_apps.llm.model.attention import Attend
from shortfin_apps.llm.model.operations import Embed, GatedLinear, LastTokens, Linear, Norm, Operation
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_model import TINY
from tests.builder.decode_batch import decode_batch

LAYER = ["Linear", "Norm", "GatedLinear", "Linear"]


class Recorded:
    """Takes any operation and every run, and keeps their kinds and what each run is to leave."""

    def __init__(self, joins: bool) -> None:
        self.runs: list[tuple[list[str], list[str]]] = []
        self._joins = joins

    def __getattr__(self, name: str) -> Any:
        return lambda e, x, *rest: x

    def takes(self, operations: Sequence[Operation], values: Values) -> int:
        kinds = (Norm, Linear, GatedLinear, Attend) if self._joins else (Norm, Linear, GatedLinear)
        for length, operation in enumerate(operations):
            if not isinstance(operation, kinds) or (length and isinstance(operation, Attend)):
                return length
        return len(operations)

    def lower(self, e: Emitter, run: Sequence[Operation], values: Values, results: Sequence[str]) -> None:
        self.runs.append(([type(operation).__name__ for operation in run], list(results)))
        for name in results:
            values[name] = values["tokens"]


@pytest.mark.parametrize("joins", [False, True])
def test_fused_runs_end_at_attentions_and_leave_what_is_read_later(joins: bool) -> None:
    recorded, others = Recorded(joins), Recorded(joins)
    fused = dict.fromkeys((Norm, Linear, GatedLinear), recorded)
    kernels = fused | dict.fromkeys((Embed, Attend, LastTokens), others)
    values = Values({"tokens": Tensor("%t", (1,), "i64")}, decode_batch(BuildOptions(), TINY, rows=1))
    Lowering(kernels, RenderedKernels(), recorded).lower(
        Emitter(), [*list(TINY.operations())], values, ["logits"]
    )
    attention = ["Attend"] if joins else []
    assert recorded.runs == [
        (["Norm", "Linear"], ["qkv"]),
        ([*attention, *LAYER, "Norm", "Linear"], ["x", "qkv"]),
        ([*attention, *LAYER], ["x"]),
        (["Norm", "Linear"], ["logits"]),
    ]
    assert others.runs == []


def test_a_kernel_of_other_sizes_gets_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "render", lambda template, name, **parameters: f"{template} {parameters}")
    rendered = RenderedKernels()
    assert rendered.render("cpu/top_k", "top_k", k=2) == rendered.render("cpu/top_k", "top_k", k=2) == "top_k"
    assert list(rendered.texts) == ["top_k"]
    names = [rendered.render("cpu/top_k", "top_k", k=k) for k in (3, 4, 3, 2)]
    assert names == ["top_k_1", "top_k_2", "top_k_1", "top_k"]
    assert list(rendered.texts.values()) == [f"cpu/top_k {{'k': {k}}}" for k in (2, 3, 4)]
    with pytest.raises(AssertionError, match="top_k names two kernels"):
        rendered.add("top_k", "another origin", str)
