"""Receipts for tests, of no model."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from shortfin_apps.llm.components.request.messages import ChosenLogit, FinishReason
from shortfin_apps.llm.serving.receipts.draft import ModelIdentity, ReceiptDraft, ReceiptOrder
from shortfin_apps.llm.serving.receipts.receipt import to_text
from shortfin_apps.llm.serving.receipts.signature import Signer

IDENTITY = ModelIdentity(to_text(b"a" * 16), to_text(b"t" * 16))
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=9,
)
TOKENS = ((5, 1.5), (6, -0.25), (7, 3.0))


def receipt_json(
    tokens: tuple[tuple[int, float], ...] = TOKENS,
    *,
    finish: FinishReason = FinishReason.LENGTH,
    prompt: str | None = None,
    signer: Signer | None = None,
    **sampling: Any,
) -> dict[str, Any]:
    order = ReceiptOrder(
        identity=IDENTITY,
        sampling={"max_tokens": len(tokens), "temperature": 0.0, **sampling},
        prompt=prompt,
        signer=signer,
    )
    draft = ReceiptDraft(order, (1, 2, 3))
    for token_id, logit in tokens:
        draft.add([token_id], [ChosenLogit(logit, "decode")])
    return draft.finish(finish)
