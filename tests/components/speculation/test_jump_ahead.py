"""Jump-ahead proposes what a grammar forces, as long as that pays."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.components.speculation.jump_ahead import JumpAhead

PROMPT = [9, 9, 9]
KEY = list(range(100, 150))


class Forcing:
    """A matcher of outputs that can only be KEY."""

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        raise AssertionError("nothing is sampled here")

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        return KEY[len(generated) :] if list(generated) == KEY[: len(generated)] else []


def jump_ahead(max_tokens: int = 8) -> JumpAhead:
    return JumpAhead(Forcing(), len(PROMPT), max_tokens)


def test_forced_tokens_are_proposed_behind_the_output() -> None:
    jump = jump_ahead()
    assert jump.propose(PROMPT, 0.5, 5) == KEY[:5]
    assert jump.propose([*PROMPT, *KEY[:3]], 0.5, 5) == KEY[3:8]
    assert jump.propose([*PROMPT, *KEY[:48]], 0.5, 5) == KEY[48:]
    assert jump.propose([*PROMPT, 7], 0.5, 5) == []
    assert jump.num_worth([*PROMPT, 7], 0.5, 5) == 0


def test_no_more_are_proposed_than_it_may_or_there_is_room_for() -> None:
    assert jump_ahead(3).propose(PROMPT, 0.0, 8) == KEY[:3]
    assert jump_ahead(3).propose(PROMPT, 0.0, 2) == KEY[:2]
    assert jump_ahead(3).propose(PROMPT, 0.0, 0) == []
    assert jump_ahead(3).propose(PROMPT, 0.0, -1) == []


def test_a_busy_batch_takes_them_too_until_they_are_wrong() -> None:
    jump = jump_ahead(32)
    assert jump.num_worth(PROMPT, 0.7, 32) == 32
    counts = []
    while count := jump.num_worth(PROMPT, 0.7, 32):
        counts.append(count)
        jump.observe(count, 0)
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < 4
    jump.observe(32, 32)
    assert jump.num_worth(PROMPT, 0.7, 32) > 8


def test_they_are_tried_again_some_time() -> None:
    jump = jump_ahead()
    while jump.num_worth(PROMPT, 0.7, 8):
        jump.observe(1, 0)
    for _ in range(200):
        jump.propose(PROMPT, 0.7, 8)
    assert jump.propose(PROMPT, 0.7, 8) != []
