from __future__ import annotations

from shortfin_apps.llm.console import PlainConsole
from shortfin_apps.llm.tools.replay.outcomes import Outcome, table


def shown(*outcomes: Outcome) -> str:
    console = PlainConsole(width=120)
    with console.capture() as captured:
        console.print(table(outcomes))
    return captured.get()


def test_first_differences_are_shown_and_all_are_written() -> None:
    outcome = Outcome("alone", 3)
    for index, text in enumerate([None, "differs at token 1", "differs at token 2"]):
        outcome.add(index, text)
    assert "1 of 3" in shown(outcome)
    assert "receipt 2 differs at token 1" in shown(outcome)
    assert outcome.document()["differences"] == [
        {"receipt": 2, "difference": "differs at token 1"},
        {"receipt": 3, "difference": "differs at token 2"},
    ]


def test_a_schedule_that_was_not_run_is_not_ok() -> None:
    outcome = Outcome("extend-attention", 2, skipped="no entries")
    assert (outcome.num_same, outcome.document()["skipped"]) == (0, "no entries")
    assert "not run: no entries" in shown(outcome)


def test_counts_are_shown() -> None:
    outcome = Outcome("preempted", 1, details={"preemptions": 2})
    assert "ok (preemptions: 2)" in shown(outcome)
    assert outcome.document()["preemptions"] == 2


def test_texts_of_receipts_are_no_markup_and_control_no_terminal() -> None:
    outcome = Outcome("alone", 1, skipped="\x1b[2J[red][/x]")
    assert "not run: ␛[2J[red][/x]" in shown(outcome)
