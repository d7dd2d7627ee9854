"""Creates receipts, from the order to the end of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import JsonValue

from shortfin_apps.llm.components.request.messages import ChosenLogit, FinishReason
from shortfin_apps.llm.serving.receipts.encoding import to_text
from shortfin_apps.llm.serving.receipts.identity import ModelIdentity
from shortfin_apps.llm.serving.receipts.receipt import Receipt, chain_of


class Signs(Protocol):
    """A signer of receipts: a Signer, which needs an optional dependency."""

    def signed(self, receipt: Receipt) -> Receipt: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptOrder:
    """The parts of a receipt known before the answer; `prompt` is the prompt's text if it is included."""

    identity: ModelIdentity
    sampling: Mapping[str, JsonValue]
    prompt: str | None = None
    signer: Signs | None = None


class ReceiptDraft:
    """The receipt of an answer to `prompt_ids` that is still being generated."""

    def __init__(self, order: ReceiptOrder, prompt_ids: tuple[int, ...]) -> None:
        self._order = order
        self._prompt_ids = prompt_ids
        identity = order.identity
        self._chain = chain_of(identity.artifact, identity.tokenizer, prompt_ids, order.sampling)
        self._output_ids: list[int] = []
        self._entries: set[str] = set()

    def add(self, token_ids: Sequence[int], logits: Sequence[ChosenLogit]) -> None:
        """Adds the answer's next tokens, with a logit for each."""
        for token_id, (logit, entry_family) in zip(token_ids, logits, strict=True):
            self._chain.add(token_id, logit)
            self._entries.add(entry_family)
        self._output_ids += token_ids

    def finish(self, finish: FinishReason) -> dict[str, Any]:
        """Returns the receipt as JSON objects, signed if there is a key."""
        order = self._order
        receipt = Receipt(
            artifact=order.identity.artifact,
            tokenizer=order.identity.tokenizer,
            prompt_ids=self._prompt_ids,
            output_ids=tuple(self._output_ids),
            sampling=dict(order.sampling),
            finish=finish,
            entries=tuple(sorted(self._entries)),
            logits=to_text(self._chain.end),
            marks=to_text(self._chain.marks),
            prompt=order.prompt,
        )
        return (receipt if order.signer is None else order.signer.signed(receipt)).to_json()
