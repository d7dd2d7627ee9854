"""Compares replayed answers with their receipts: where they first differ, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rich.table import Table

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.serving.receipts.draft import ModelIdentity
from shortfin_apps.llm.serving.receipts.receipt import Receipt, from_text, to_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A replayed answer. It may have more tokens than the receipt.

    `marks` are the marks of its chain (one byte of the digest per token), `end` is the chain's final digest
    as text. `logits` are set if this process computed the answer. `finish` is None if the replay was stopped
    before the answer finished.
    """

    token_ids: tuple[int, ...]
    marks: bytes
    end: str
    logits: tuple[float, ...] | None = None
    finish: FinishReason | None = None


def replayed_of(receipt: Receipt) -> Replayed:
    """Convert the receipt that a server returned for a replayed answer."""
    return Replayed(
        token_ids=receipt.output_ids,
        marks=from_text(receipt.marks),
        end=receipt.logits,
        finish=receipt.finish,
    )


def computed_again(
    receipt: Receipt, token_ids: Sequence[int], logits: Sequence[float], finish: FinishReason | None
) -> Replayed:
    """Convert an answer that this process computed; `logits` has one logit per token."""
    chain = receipt.new_chain()
    for token_id, logit in zip(token_ids, logits, strict=True):
        chain.add(token_id, logit)
    return Replayed(
        token_ids=tuple(token_ids),
        marks=chain.marks,
        end=to_text(chain.end),
        logits=tuple(logits),
        finish=finish,
    )


def other_model(receipt: Receipt, identity: ModelIdentity) -> str | None:
    """Describe how the model `identity` differs from the receipt's model; None if they are the same."""
    names = [field.name for field in fields(identity)]
    differing = [
        f"its {name} is {getattr(receipt, name)}, and this one {getattr(identity, name)}"
        for name in names
        if getattr(receipt, name) != getattr(identity, name)
    ]
    return ", and ".join(differing) or None


def difference(receipt: Receipt, replayed: Replayed) -> str | None:
    """Describe where the replayed answer first differs from the receipt; None if all bits are the same.

    If the receipt's answer was aborted, further tokens of the replayed answer are no difference.
    """
    ids, again, marks = receipt.output_ids, replayed.token_ids, from_text(receipt.marks)
    for index, (was, now) in enumerate(zip(ids, again, strict=False)):
        if was != now:
            return f"differs at token {index + 1} of {len(ids)}: {was} is now {now}"
        if marks[index] != replayed.marks[index]:
            return f"differs at token {index + 1} of {len(ids)}: {_logit(was, index, replayed)}"
    if len(again) < len(ids):
        return f"ends after {len(again)} of {len(ids)} tokens"
    if len(again) > len(ids):
        is_cut = receipt.finish is FinishReason.ABORT
        return None if is_cut else f"continues after token {len(ids)}, which was the last"
    if replayed.end != receipt.logits:
        return f"the digest is {replayed.end}, not {receipt.logits}, and no mark tells at which token"
    return _other_finish(receipt, replayed)


def _logit(token_id: int, index: int, replayed: Replayed) -> str:
    logit = "its logit" if replayed.logits is None else f"its logit, now {replayed.logits[index]!r},"
    return f"the token is {token_id} as it was, but {logit} has other bits (or that of a token before it)"


def _other_finish(receipt: Receipt, replayed: Replayed) -> str | None:
    """Describe a difference of finish reasons, or return None.

    Aborts are not compared, nor is a stop at a stop string in a local replay, which does not apply them.
    """
    was, now = receipt.finish, replayed.finish
    if now is None or was is now or was is FinishReason.ABORT or now is FinishReason.ABORT:
        return None
    if was is FinishReason.STOP and replayed.logits is not None and receipt.sampling.get("stop"):
        return None
    return f"ends for another reason: {was} is now {now}"


@dataclass(slots=True)
class Outcome:
    """The outcome of one schedule (one way to recompute the answers).

    `differences`: by receipt number, counted from 1; `skipped`: why the schedule was not run, None if it was;
    `details`: counts, such as preemptions, which prove that the schedule did what its name says.
    """

    schedule: str
    num_receipts: int
    differences: dict[int, str] = field(default_factory=dict)
    details: dict[str, int] = field(default_factory=dict)
    skipped: str | None = None

    @property
    def num_same(self) -> int:
        return 0 if self.skipped else self.num_receipts - len(self.differences)

    def add(self, index: int, difference: str | None) -> None:
        """Record the outcome of receipt `index`, counted from 0; a `difference` of None: no difference."""
        if difference is not None:
            self.differences[index + 1] = difference

    def document(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "receipts": self.num_receipts,
            "same": self.num_same,
            "skipped": self.skipped,
            "differences": [{"receipt": n, "difference": text} for n, text in self.differences.items()],
            **self.details,
        }


def table(outcomes: Sequence[Outcome]) -> Table:
    made = Table("schedule", "same", "result", title="to the bit")
    for outcome in outcomes:
        made.add_row(outcome.schedule, f"{outcome.num_same} of {outcome.num_receipts}", _result(outcome))
    return made


def _result(outcome: Outcome) -> str:
    if outcome.skipped is not None:
        return f"not run: {outcome.skipped}"
    details = ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in outcome.details.items())
    if not outcome.differences:
        return f"ok ({details})" if details else "ok"
    number, text = next(iter(outcome.differences.items()))
    return text if outcome.num_receipts == 1 else f"receipt {number} {text}"
