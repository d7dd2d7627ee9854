"""Replays receipts on a server, under its current load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shortfin_apps.llm.client import LlmClient
from shortfin_apps.llm.client.errors import ServerError
from shortfin_apps.llm.client.sending import together
from shortfin_apps.llm.serving.receipts.draft import ModelIdentity
from shortfin_apps.llm.serving.receipts.receipt import Receipt, ReceiptError
from shortfin_apps.llm.serving.receipts.sampling import request_sampling
from shortfin_apps.llm.tools.replay.compare import Outcome, difference, other_model, replayed_of


async def replay_on(client: LlmClient, receipts: Sequence[Receipt], concurrency: int) -> Outcome:
    """Request every answer again, `concurrency` at a time. Raises LlmError, also if the model differs."""
    outcome = Outcome("served", len(receipts))
    waiting = iter(enumerate(receipts))

    async def worker() -> None:
        for index, receipt in waiting:
            again = _receipt_in(await client.generate_native(_body(receipt)))
            outcome.add(index, _difference(receipt, again))

    await together(worker, min(concurrency, len(receipts)))
    return outcome


def _body(receipt: Receipt) -> dict[str, object]:
    sampling = request_sampling(receipt.sampling)
    return {"input_ids": list(receipt.prompt_ids), "sampling_params": sampling, "receipt": True}


def _receipt_in(answer: Any) -> Receipt:
    try:
        found = answer["responses"][0]["responses"][0]["meta_info"]["receipt"]
    except (LookupError, TypeError):
        raise ServerError(
            "the server's answer has no receipt; is it this project's, of this version?"
        ) from None
    return Receipt.parse(found)


def _difference(receipt: Receipt, again: Receipt) -> str | None:
    served = ModelIdentity(again.artifact, again.tokenizer)
    if (differing := other_model(receipt, served)) is not None:
        raise ReceiptError(f"the receipt is of another model than the server's: {differing}")
    was, now = receipt.sampling, again.sampling
    if names := sorted(name for name in {*was, *now} if was.get(name) != now.get(name)):
        return f"the server read `sampling` otherwise: {', '.join(names)}"
    return difference(receipt, replayed_of(again))
