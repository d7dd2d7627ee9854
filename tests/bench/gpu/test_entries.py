from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest

from bench.gpu.entries import Case, RecordedProgram, cases, pages
from bench.gpu.loops import loop_sizes
from bench.gpu.models import MODELS, Model
from shortfin_apps.llm.contract.abi import EntryFamily


class Program:
    """Remembers what is submitted."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self.submitted: list[tuple[str, list[Any]]] = []

    def submit(self, entry: str, arguments: Sequence[Any]) -> Any:
        self.submitted.append((entry, list(arguments)))


def page_ids(case: Case) -> list[int]:
    return list(chain.from_iterable(task.page_ids for task in case.batch.tasks))


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_no_two_tasks_of_a_case_share_a_page(model: Model) -> None:
    found = list(cases(model, has_extend=True))
    for case in found:
        ids = page_ids(case)
        assert len(set(ids)) == len(ids)
        assert min(ids) > 0
        assert max(ids) < pages(found)
        assert sum(len(task.token_ids) for task in case.batch.tasks) == case.new_tokens


def test_an_extend_has_a_prompt_and_decodes_at_the_context() -> None:
    model = MODELS["smollm2-135m"]
    mixed = [case for case in cases(model, has_extend=True) if case.batch.family is EntryFamily.EXTEND][1]
    prompt, *decodes = mixed.batch.tasks
    assert (len(prompt.token_ids), prompt.seq_len) == (256, 256)
    assert len(decodes) == 64
    assert {(len(task.token_ids), task.seq_len) for task in decodes} == {(1, model.context)}


def test_a_program_without_extend_has_no_such_case() -> None:
    families = {case.batch.family for case in cases(MODELS["smollm2-135m"], has_extend=False)}
    assert families == {EntryFamily.DECODE, EntryFamily.PREFILL}


def test_the_last_invocation_is_repeated_with_its_arguments() -> None:
    program = Program()
    recorded = RecordedProgram(program)
    arguments: list[Any] = ["tokens", "slab"]
    recorded.submit("prefill_bs1", [])
    recorded.submit("decode_bs1", arguments)
    arguments.clear()
    recorded.repeat()
    assert recorded.last_entry == "decode_bs1"
    assert program.submitted[1:] == [("decode_bs1", ["tokens", "slab"])] * 2
    other: Any = "positions"
    recorded.replace(0, other)
    recorded.repeat()
    assert program.submitted[3:] == [("decode_bs1", ["positions", "slab"])]


def test_loop_sizes_are_those_of_the_program() -> None:
    assert loop_sizes(["decode_bs4", "decode_loop_bs8", "decode_loop_bs1", "extend", "main"]) == [1, 8]
