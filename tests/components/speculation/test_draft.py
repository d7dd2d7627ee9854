"""A draft asks its proposers in order, and tells the one that it took what became of it."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.components.speculation.draft import Draft, Proposer


class Scripted(Proposer):
    """Proposes the same tokens always."""

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = list(token_ids)
        self.observed: list[tuple[int, int]] = []

    def num_worth(self, token_ids: Sequence[int], least: float, most: int) -> int:
        return min(most, len(self.token_ids))

    def propose(self, token_ids: Sequence[int], least: float, most: int) -> list[int]:
        return self.token_ids[:most]

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        self.observed.append((num_proposed, num_accepted))


def test_the_first_proposer_with_a_proposal_is_taken() -> None:
    silent, first, second = Scripted(), Scripted(1, 2, 3), Scripted(4)
    draft = Draft([silent, first, second])
    assert draft.would_propose([7], 0.5, 2)
    assert draft.propose([7], 0.5, 2) == [1, 2]
    draft.observe(2, 1)
    assert (silent.observed, first.observed, second.observed) == ([], [(2, 1)], [])


def test_without_proposers_nothing_is_proposed() -> None:
    for draft in (Draft([]), Draft([Scripted()])):
        assert not draft.would_propose([7], 0.5, 2)
        assert draft.propose([7], 0.5, 2) == []
