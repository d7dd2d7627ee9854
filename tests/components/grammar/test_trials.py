from __future__ import annotations

import asyncio
import os
import selectors
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from shortfin_apps.llm import limited_process
from shortfin_apps.llm.components.grammar import trial_process, trials
from shortfin_apps.llm.components.grammar.compiled import UnusableGrammar
from shortfin_apps.llm.components.grammar.source import (
    GrammarKind,
    GrammarSource,
    choice_source,
    schema_source,
)
from shortfin_apps.llm.components.grammar.trial_process import TrialLimits
from shortfin_apps.llm.components.grammar.trials import OVER_LIMITS_S, OverLimitsError, Refusals, Trials
from shortfin_apps.llm.contract.errors import OverloadedError
from tests.components.grammar.hostile import NEVER_COMPILED, UNLIMITED
from tests.serving.text.tiny_tokenizers import byte_level_backend

pytestmark = pytest.mark.timeout(60)

BACKEND = byte_level_backend()
ENDS = [BACKEND.get_vocab_size() - 1]
LETTER = GrammarSource(GrammarKind.REGEX, "a")


def new_trials(limits: TrialLimits = UNLIMITED) -> Trials:
    return Trials(BACKEND.to_str(), ENDS, limits)


def workers_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def first_worker(trials: Trials) -> int:
    """Its process id, as soon as there is one."""
    while not (workers := workers_of(trials.process.pid)):
        await asyncio.sleep(0)
    return workers[0]


def wait_for_end(pid: int) -> None:
    """Returns when a process of anyone's has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        selector.select()
    os.close(fd)


async def test_an_outcome_is_the_librarys() -> None:
    trials = new_trials()
    await trials.run(LETTER)
    with pytest.raises(UnusableGrammar, match="unclosed group"):
        await trials.run(GrammarSource(GrammarKind.REGEX, "(a"))
    await trials.run(choice_source(["x" * 200 + str(i) for i in range(300)]))


@pytest.mark.parametrize(
    "limits",
    [
        TrialLimits(cpu_s=0.1, wall_s=1e3),
        TrialLimits(cpu_s=1e3, wall_s=0.1),
        TrialLimits(cpu_s=1e3, wall_s=1e3, memory_bytes=1 << 20),
    ],
    ids=str,
)
async def test_each_limit_ends_a_trial(limits: TrialLimits) -> None:
    trials = new_trials(limits)
    with pytest.raises(UnusableGrammar, match="simplify it"):
        await trials.run(NEVER_COMPILED)
    assert not trials.are_over


async def test_a_suspension_is_not_blamed_on_the_grammar() -> None:
    """For the clock it lasts an hour between the worker's two answers."""
    hours = count(step=3600)
    trials = Trials(BACKEND.to_str(), ENDS, TrialLimits(cpu_s=0.1, wall_s=1e3), lambda: float(next(hours)))
    with pytest.raises(OverloadedError, match="try again"):
        await trials.run(NEVER_COMPILED)


def test_a_bug_of_the_library_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_process, "compiled", lambda source, tokenizer: 1 // 0)
    tokenizer = LLTokenizer(BACKEND.to_str(), eos_token=ENDS)
    assert "ZeroDivisionError" in trial_process._problem(tokenizer, LETTER.to_json())


async def test_a_trial_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its process is stopped."""
    monkeypatch.setattr(limited_process, "SLACK_S", 0.0)
    trials = new_trials(TrialLimits(cpu_s=1e3, wall_s=0.0))
    os.kill(trials.process.pid, signal.SIGSTOP)
    with pytest.raises(OverloadedError):
        await trials.run(LETTER)


async def test_a_cancelled_trial_ends_at_once() -> None:
    trials = new_trials()
    trial = asyncio.create_task(trials.run(NEVER_COMPILED))
    worker = await first_worker(trials)
    trial.cancel()
    await asyncio.to_thread(wait_for_end, worker)
    assert not workers_of(trials.process.pid), "nor is it a zombie"
    await trials.run(LETTER)


async def test_trials_of_a_process_that_has_ended_are_refused() -> None:
    trials = new_trials()
    trial = asyncio.create_task(trials.run(NEVER_COMPILED))
    await first_worker(trials)
    trials.close()
    with pytest.raises(OverloadedError):
        await trials.run(LETTER)
    trial.cancel()


async def test_a_trial_that_was_handed_over_in_vain_is_refused() -> None:
    """The process had no time to take it."""
    trials = Trials("{}", ENDS, UNLIMITED)  # no tokenizer
    with pytest.raises(OverloadedError):
        await trials.run(LETTER)
    trials.process.wait()
    assert trials.are_over


OWNER = """
import asyncio
from tests.components.grammar.test_trials import NEVER_COMPILED, first_worker, new_trials

async def main():
    trials = new_trials()
    trial = asyncio.create_task(trials.run(NEVER_COMPILED))
    print(trials.process.pid, await first_worker(trials), flush=True)
    await trial

asyncio.run(main())
"""


def test_everything_ends_with_a_server_that_is_killed() -> None:
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, cwd=root) as owner:
        assert owner.stdout is not None
        process, worker = map(int, owner.stdout.readline().split())
        owner.kill()
        owner.wait()
        wait_for_end(worker)
        wait_for_end(process)


def is_refused(refused: Refusals, source: GrammarSource) -> bool:
    try:
        refused.check(source)
    except UnusableGrammar as unusable:
        return str(unusable) == f"reason of {source.text}"
    return False


def source_of(text: str) -> GrammarSource:
    return GrammarSource(GrammarKind.REGEX, text)


def refuse(refused: Refusals, text: str, kind: type[UnusableGrammar] = UnusableGrammar) -> None:
    refused.add(source_of(text), kind(f"reason of {text}"))


def test_a_refusal_is_of_the_same_content_alone() -> None:
    refused = Refusals()
    refuse(refused, "{}")
    assert is_refused(refused, source_of("{}"))
    assert not is_refused(refused, source_of("{} "))
    assert not is_refused(refused, schema_source("{}"))


def test_only_the_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MAX_REFUSALS", 3)
    refused = Refusals()
    for text in "abc":
        refuse(refused, text)
    assert is_refused(refused, source_of("a"))
    refuse(refused, "d")
    assert [text for text in "abcd" if is_refused(refused, source_of(text))] == ["a", "c", "d"]
    assert len(refused) == 3


def test_a_grammar_over_the_limits_is_tried_again_some_time_later() -> None:
    now_s = 0.0
    refused = Refusals(lambda: now_s)
    refuse(refused, "wrong")
    refuse(refused, "slow", OverLimitsError)
    now_s = OVER_LIMITS_S - 1
    assert is_refused(refused, source_of("slow"))
    now_s = OVER_LIMITS_S
    assert not is_refused(refused, source_of("slow"))
    assert is_refused(refused, source_of("wrong"))
    assert len(refused) == 1
