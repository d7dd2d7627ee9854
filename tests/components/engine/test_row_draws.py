"""Requests without top_k get the same tokens wherever they are sampled; the device keeps their logits."""

from __future__ import annotations

from typing import Any

import pytest

from shortfin_apps.llm.components.request.messages import FinishReason, GenerateCall
from shortfin_apps.llm.contract.errors import InvocationError
from tests.components.engine_fixture import PROMPT, Rig, call, make_rig
from tests.components.fake_device import VOCAB, fake_config

KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.9},
    {"temperature": 2.0, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 0.5, "min_p": 0.1},
]


def calls(count: int = len(KINDS), **params: Any) -> list[GenerateCall]:
    kinds = [{**KINDS[i % len(KINDS)], **params} for i in range(count)]
    return [call(str(i), PROMPT[i:], 9, seed=i, **kind) for i, kind in enumerate(kinds)]


def rig(**options: Any) -> Rig:
    config = fake_config(pages=options.pop("pages", 64))
    return make_rig(config, max_running=8, **options)


def outputs(made: Rig, several: list[GenerateCall]) -> dict[str, list[int]]:
    for each in several:
        made.engine.add(each)
    made.run()
    return made.outputs


def invoked(made: Rig, family: str) -> int:
    return sum(name.startswith(family) for name, _ in made.program.calls)


def record_downloads(made: Rig) -> list[int]:
    """The sizes of the last dimension of what is downloaded from now on."""
    sizes: list[int] = []
    download = made.device.download

    def recorded(buffer: Any) -> Any:
        sizes.append(buffer.shape[-1])
        return download(buffer)

    made.device.download = recorded  # type: ignore[method-assign]
    return sizes


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("loop_sizes", [(), (1, 2, 4, 8)])
def test_tokens_are_those_of_the_host(mode: str, loop_sizes: tuple[int, ...]) -> None:
    expected = outputs(rig(mode=mode), calls())
    made = rig(mode=mode, sample_sizes=(2, 4), loop_sizes=loop_sizes)
    sizes = record_downloads(made)
    assert outputs(made, calls()) == expected
    assert invoked(made, "sample") > 0
    assert (invoked(made, "decode_loop") > 0) is bool(loop_sizes)
    assert VOCAB not in sizes, "logits were downloaded"


def test_more_rows_than_the_largest_entry_takes_several() -> None:
    expected = outputs(rig(), calls(temperature=1.0, top_k=0))
    made = rig(sample_sizes=(2,))
    assert outputs(made, calls(temperature=1.0, top_k=0)) == expected


def test_preempted_requests_draw_the_same_tokens() -> None:
    expected = outputs(rig(), calls())
    made = rig(sample_sizes=(8,), loop_sizes=(8,), pages=12, prefix_cache="none")
    assert outputs(made, calls()) == expected
    assert made.engine.stats().preemptions > 0


def test_requests_that_need_logits_get_them_beside_those_that_do_not() -> None:
    several = [*calls(), call("logprobs", PROMPT, 3, temperature=1.0, seed=9, logprobs=2)]
    expected = outputs(rig(), several)
    made = rig(sample_sizes=(8,), loop_sizes=(8,))
    assert outputs(made, several) == expected


def test_a_spoiled_row_fails_its_request_alone() -> None:
    made = rig(sample_sizes=(8,))
    made.program.faults.spoil = lambda row: row == 0
    made.engine.add(calls()[0])
    made.run()
    assert made.reason("0") is FinishReason.ERROR
    assert made.all_pages_back()


def test_a_draw_that_fails_ends_the_requests_of_its_batch() -> None:
    made = rig(sample_sizes=(8,))
    several = calls(temperature=1.0, top_k=0)

    def fail(entry: str) -> None:
        if entry.startswith("sample"):
            raise InvocationError("the device failed")

    made.program.faults.before = fail
    assert outputs(made, several) == {str(row): [] for row in range(len(KINDS))}
    made.program.faults.before = lambda entry: None
    made.last.clear()
    assert outputs(made, several) == outputs(rig(), several)
    assert made.all_pages_back()
