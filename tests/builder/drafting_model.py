"""Small models with draft layers: what all entries store for the layer, and what it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.contract.abi import (
    DRAFTED,
    HIDDEN_PER_SLOT,
    NO_HIDDEN,
    chosen_place,
    drafted_place,
    hidden_row,
    num_places,
)
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.draft_layer import DraftLayer
from shortfin_apps.llm.model.eagle_head import EagleHead
from shortfin_apps.llm.model.feed_forward import MLP
from shortfin_apps.llm.model.reference.draft import draft, hidden_before, known_hidden
from shortfin_apps.llm.model.rope import Rope
from tests.builder.compiled_model import HYBRID, LATENT, TINY, CompiledModel
from tests.builder.hybrid_model import PAGE_IDS, STRIDE, TOKENS

F32 = npt.NDArray[np.float32]

DRAFTING = replace(HYBRID, draft=DraftLayer(blocks=HYBRID.layers[1]))
PLAIN = replace(TINY, draft=DraftLayer(blocks=TINY.layers[1], keeps_normed=False))
OF_LATENTS = replace(LATENT, draft=DraftLayer(blocks=LATENT.layers[1], keeps_normed=False))
# A head of its own shape and rotation, for a part of the vocabulary; and one that shares all it can.
EAGLE = replace(
    HYBRID,
    draft=EagleHead(
        blocks=(
            Attention(
                heads=2, kv_heads=2, head_dim=16, rope=Rope(theta=500.0, name="draft"), norm_before=False
            ),
            MLP(features=96),
        ),
        reads=(1, 3, 2),
        vocab_size=HYBRID.vocab_size,
        head_rows=96,
        maps_rows=True,
    ),
)
SHARING_HEAD = replace(
    TINY,
    draft=EagleHead(
        blocks=(replace(TINY.attention, norm_before=False), TINY.layers[0][1]),
        reads=(2, 1, 1),
        vocab_size=TINY.vocab_size,
        norm_before_residual=True,
    ),
)
ROUNDS = 3


def row(position: int) -> int:
    return hidden_row(0, position)


def prefill(model: CompiledModel, start: int, end: int, hidden_from: int) -> None:
    tokens = np.zeros((2, -(-(end - start) // STRIDE) * STRIDE), np.int64)
    tokens[0, : end - start] = TOKENS[start:end]
    model.hidden_from, model.hidden_to = [hidden_from], [row(end - 1)]
    model.prefill("prefill_bs2", tokens, np.array([start, 0]), np.array([end, 1]), PAGE_IDS)


def decode(model: CompiledModel, position: int) -> None:
    model.hidden_from, model.hidden_to = [row(position - 1)], [row(position)]
    tokens, starts = np.array([[TOKENS[position]], [0]]), np.array([position, 0])
    model.decode("decode_bs2", tokens, starts, PAGE_IDS)


def extend(model: CompiledModel, start: int, end: int, hidden_from: Sequence[int]) -> None:
    """Rows of one token each, in one invocation, each after the one before it."""
    positions = np.arange(start, end)
    model.hidden_from, model.hidden_to = hidden_from, [row(each) for each in range(start, end)]
    model.extend(
        "extend",
        TOKENS[positions],
        np.arange(len(positions)),
        positions,
        positions + 1,
        PAGE_IDS[[0] * len(positions)],
        followers=np.array([len(positions) - 1, *[-1] * (len(positions) - 1)]),
    )


def drafts(model: CompiledModel, position: int, checked: tuple[int, int] | None = None) -> list[F32]:
    """The logits of each round, from the token at `position` on.

    With `checked`, the device finds this token: after as many right drafts of as many.
    """
    found: list[F32] = []
    for round_ in range(ROUNDS):
        at = position + round_
        table, given = np.full(num_places(1), -9), {"tokens": [TOKENS[at]], "positions": [at]}
        hidden_from = [row(at - 1)]
        if round_:  # later rounds read their token from the device's table, as it was drawn there
            table[drafted_place(1, 0, at)] = TOKENS[at]
            given |= {"tokens": [-9], "checked": [DRAFTED]}
            hidden_from = [NO_HIDDEN]
        elif checked is not None:
            num_right, num_drafted = checked
            before = at - 1 - num_right
            for each in range(before + 1, at + 1):
                table[chosen_place(1, 0, each)] = table[drafted_place(1, 0, each)] = TOKENS[each]
            if num_right < num_drafted:
                table[drafted_place(1, 0, at)] = TOKENS[at] + 1
            given |= {"tokens": [-9], "positions": [before], "checked": [num_drafted]}
            hidden_from = [NO_HIDDEN]
        made = model.draft(
            "draft_bs2", PAGE_IDS, slots=[0], hidden_from=hidden_from, last_tokens=table.copy(), **given
        )
        assert made.positions.tolist() == [at + 1, -1]
        assert made.token_ids[0] == made.logits[0].argmax()
        table[drafted_place(1, 0, at + 1)] = made.token_ids[0]
        np.testing.assert_array_equal(made.last_tokens, table)
        found.append(made.logits[0])
    return found


def expected(model: CompiledModel, position: int, unknown: Sequence[int] = ()) -> list[F32]:
    """As `drafts`; the hidden state before the tokens at `unknown` is 0."""
    spec, weights = model.spec, model.weights
    previous = hidden_before(known_hidden(spec, weights, TOKENS[: position + 1]))
    previous[list(unknown)] = 0
    logits, hidden, cached = draft(spec, weights, TOKENS[: position + 1], previous)
    found = [logits[-1]]
    past = np.stack([cached.keys, cached.values])
    for at in range(position + 1, position + ROUNDS):
        logits, hidden, cached = draft(spec, weights, TOKENS[at : at + 1], hidden[-1:], past)
        past = np.concatenate([past, np.stack([cached.keys, cached.values])], axis=1)
        found.append(logits[-1])
    return found


def check(
    model: CompiledModel,
    tolerance: float,
    position: int,
    unknown: Sequence[int] = (),
    checked: tuple[int, int] | None = None,
) -> None:
    wanted = expected(model, position, unknown)
    for found, of_round in zip(drafts(model, position, checked), wanted, strict=True):
        np.testing.assert_allclose(found, of_round, rtol=tolerance, atol=tolerance)


def check_drafts(model: CompiledModel, tolerance: float) -> None:
    """After chunks, decodes and rows that follow each other, over what earlier drafts have left."""
    model.fill_cache(0xFF)
    prefill(model, 0, 8, 0)
    prefill(model, 8, 13, row(7))
    check(model, tolerance, 13)
    for position in range(13, 16):
        decode(model, position)
    check(model, tolerance, 16)  # over the keys and values of the drafts
    extend(model, 16, 21, [row(15), -1, -1, -1, -1])
    check(model, tolerance, 21)
    check(model, tolerance, 19)  # as if two tokens had been rejected
    most = HIDDEN_PER_SLOT - 1
    for checked in ((2, 3), (2, 2), (0, 1), (0, 0), (1, most), (most, most)):
        check(model, tolerance, 19, checked=checked)


def check_unknown(model: CompiledModel, tolerance: float) -> None:
    """As after pages of a cached prefix: rows of the table that were not named have NaN."""
    model.fill_cache(0xFF)
    prefill(model, 0, 8, 0)
    prefill(model, 8, 14, 0)
    check(model, tolerance, 14, unknown=[8])
