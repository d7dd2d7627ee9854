"""Rows that a kernel class adjusts and draws from, against the host, token by token and to the bit."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.lowering import AdjustedRows, DrawState, LeftRows
from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.invocation.loop_state import padded
from shortfin_apps.llm.components.invocation.row_draws import padded_draws, padded_edits
from shortfin_apps.llm.components.invocation.slot_tables import counts_before
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.adjustments import adjustments, whole_row
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.components.sampling.row_edits import RowEdits
from shortfin_apps.llm.components.sampling.sampler import Sampler
from shortfin_apps.llm.contract.abi import NOT_FINITE, NOT_SEEN
from tests.builder.draw_tests import Draws, Ints, assert_stored, slots_of, unused
from tests.builder.kernels.triton.launched import Launched
from tests.components.engine_fixture import call

ENDS = frozenset({1, 7})
LEFT, ROWS, K = 30, 64, 8
PADDING = 5  # of the rows

Floats = npt.NDArray[np.float32]


def some_params(rng: np.random.Generator, size: int) -> dict[str, Any]:
    """What a request asks for; about half of it is off."""
    tokens = rng.integers(0, size + 3, 40).tolist()
    allowed = frozenset(rng.integers(0, size, int(rng.choice([1, 5, size // 2]))).tolist()) | {2}
    asked: dict[str, Any] = {
        "repetition_penalty": float(rng.choice([0.7, 1.1, 1.3])),
        "frequency_penalty": float(rng.choice([-0.3, 0.1, 1.7])),
        "presence_penalty": float(rng.choice([-0.5, 0.3, 2.0])),
        "logit_bias": tuple((token, float(rng.normal(0, 5))) for token in tokens),
        "bad_words": tuple((token,) for token in tokens[:20] if token != 2),
        "allowed_token_ids": allowed,
        "min_tokens": 100,
        "top_p": float(rng.choice([0.1, 0.8, 0.999])),
        "min_p": float(rng.choice([0.01, 0.3])),
    }
    kept = {name: value for name, value in asked.items() if rng.random() < 0.5}
    temperature, top_k = float(rng.choice([0.0, 0.3, 1.0, 3.0])), int(rng.choice([0, 0, 1, K]))
    return {**kept, "temperature": temperature, "top_k": top_k}


def some_requests(rng: np.random.Generator, size: int) -> list[Request]:
    requests = []
    for row in range(ROWS - PADDING):
        params = {"presence_penalty": 0.25, **some_params(rng, size), "seed": int(rng.integers(0, 2**63))}
        request = Request(call(str(row), rng.integers(0, size, 20).tolist(), 2**13, **params))
        request.token_ids += rng.integers(0, size, int(rng.integers(0, 60))).tolist()
        requests.append(request)
    return requests


def counts_of(request: Request, size: int) -> Ints:
    """How often each token was generated, as the table has it."""
    counts = np.full(size, NOT_SEEN)
    prompt, output = request.call.prompt_token_ids, request.token_ids[len(request.call.prompt_token_ids) :]
    for token_id in prompt:
        counts[token_id] = 0
    for token_id in output:
        counts[token_id] = max(counts[token_id], 0) + 1
    return counts


def assert_counted(
    table: Ints, arguments: dict[str, npt.NDArray[Any]], requests: list[Request], token_ids: Ints
) -> None:
    """That the rows' slots have their counts, with the new tokens, and that other slots have not changed.

    Without a repetition penalty, it makes no difference whether a token is in the prompt.
    """
    expected, found = arguments["counts"].copy(), table.copy()
    for row, (slot, request) in enumerate(zip(arguments["slots"], requests, strict=False)):
        if slot >= 0:
            expected[slot] = counts_of(request, table.shape[1])
            expected[slot, token_ids[row]] = max(expected[slot, token_ids[row]], 0) + 1
            if request.call.params.repetition_penalty == 1:
                for counts in (expected, found):
                    counts[slot] = np.maximum(counts[slot], 0)
    np.testing.assert_array_equal(found, expected)


def arguments_of(requests: list[Request], sources: list[int], size: int) -> dict[str, npt.NDArray[Any]]:
    """In turns, the table has the counts of a row, the edits have them, and a row has edits and no slot."""
    sampler = Sampler(ENDS, num_candidates=K, draws_rows=True, adjusts_rows=True)
    ends = [len(request.token_ids) for request in requests]
    tasks = [
        LlmTaskInput(r, r.token_ids[-1:], end - 1, end, []) for r, end in zip(requests, ends, strict=True)
    ]
    edits = [edits for request in requests if (edits := sampler.row_edits(request)) is not None]
    assert len(edits) == len(requests)
    arrays = padded_draws(ROWS, tasks, range(len(tasks)), sampler.device_fields)
    slots = slots_of(ROWS)
    slots[2 : len(tasks) : 3] = slots[len(tasks) :] = -1
    counts = np.random.default_rng(1).integers(-1, 99, (ROWS + 9, size))
    for row in range(0, len(tasks), 3):
        counts[slots[row]] = counts_of(requests[row], size)
    seen = [counts_before(task) if row % 3 else None for row, task in enumerate(tasks)]
    state = {"slots": slots, "last_tokens": unused(ROWS), "row_indices": padded(sources, ROWS, 0)}
    return arrays | padded_edits(ROWS, edits, seen, size) | state | {"counts": counts}


def launched(size: int, draws: Draws, returned: str) -> Launched:
    """A program that returns tokens, both tables and positions, or adjusted logits."""
    context = draws.context(K, size)

    def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        names = [each.name for each in fields(AdjustedRows)]
        rows, kernels = AdjustedRows(*(tensors[name] for name in names)), draws.sampling(context)
        logits, counts = kernels.adjust(e, rows)
        if returned == "logits":
            return [logits]
        values, indices = draws.top_k(context).top_k(e, logits)
        best = LeftRows(values, indices, logits)
        drawn = ("slots", "positions", "sampling", "last_tokens")
        state = DrawState(**{name: tensors[name] for name in drawn}, counts=counts)
        token_ids, state = kernels.sample(e, best, state, advances=True)
        assert state.counts is not None
        return [token_ids, state.last_tokens, state.counts, state.positions]

    inputs: dict[str, tuple[str, tuple[int | str, ...]]] = {
        "logits": ("f32", ("left", 1, size)),
        **dict.fromkeys(("row_indices", "slots", "positions", "allowed_indices", "resets"), ("i64", (ROWS,))),
        "sampling": ("i64", (6, ROWS)),
        "penalties": ("f32", (3, ROWS)),
        "edits": ("i32", (4, "edits")),
        "allowed": ("i32", ("bitmasks", -(-size // 32))),
        "last_tokens": ("i64", ("slots",)),
        "counts": ("i32", ("slots", size)),
    }
    return draws.launch(inputs, body, context)


def some_logits(rng: np.random.Generator, size: int) -> Floats:
    logits = rng.normal(0, 3, (LEFT, size)).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    logits[:, 5] = -np.inf
    return logits


def adjusted(logits: Floats, request: Request) -> Floats:
    row = whole_row(logits)
    for each in adjustments(ENDS):
        if each.num_lost(request.call.params, request.num_generated):
            row = each.apply(row, request)
    assert row.logits is not None
    return row.logits.astype(np.float32)


class AdjustTests:
    """Tests of a kernel class; the fixture `draws` has it."""

    @pytest.mark.parametrize("size", [67, 3001])
    def test_logits_and_tokens_are_those_of_the_host(self, size: int, draws: Draws) -> None:
        """To the bit: no product is fused with a sum, and quotients are rounded as numpy's are."""
        rng = np.random.default_rng(size)
        logits, requests = some_logits(rng, size), some_requests(rng, size)
        sources = rng.integers(0, LEFT, len(requests)).tolist()
        arguments = {"logits": logits[:, None], **arguments_of(requests, sources, size)}
        [got] = launched(size, draws, "logits")(**arguments)
        for row, (request, source) in enumerate(zip(requests, sources, strict=True)):
            np.testing.assert_array_equal(got[row], adjusted(logits[source], request))
        np.testing.assert_array_equal(got[-PADDING:], logits[:1].repeat(PADDING, axis=0))

        host = Sampler(ENDS, num_candidates=K)
        nothing = np.empty(0, np.float32), np.empty(0, np.int64)
        expected = [
            host.sample(Candidates(*nothing, logits[source]), request)
            for request, source in zip(requests, sources, strict=True)
        ]
        tokens, table, counts, positions = launched(size, draws, "tokens")(**arguments)
        np.testing.assert_array_equal(tokens[:-PADDING], expected)
        slots = arguments["slots"]
        assert_stored(table, slots, tokens, slots >= 0)
        is_used = np.arange(ROWS) < ROWS - PADDING
        np.testing.assert_array_equal(positions, arguments["positions"] + is_used)
        assert_counted(counts, arguments, requests, tokens)

    def test_spoiled_rows_and_those_without_a_token_left_have_none(self, draws: Draws) -> None:
        size = 67
        rng = np.random.default_rng(1)
        logits, requests = some_logits(rng, size), some_requests(rng, size)[:3]
        logits[0, 60], logits[1, 60] = np.nan, np.inf
        arguments = arguments_of(requests, [0, 1, 2], size)
        nothing_allowed, everything = RowEdits(), RowEdits()
        nothing_allowed.allow(b"")
        edits = [everything, everything, nothing_allowed]
        arguments |= padded_edits(ROWS, edits, [None] * 3, size)
        tokens, table, counts, _ = launched(size, draws, "tokens")(logits=logits[:, None], **arguments)
        assert tokens[:3].tolist() == [NOT_FINITE] * 3
        assert_stored(table, arguments["slots"], tokens, np.full(ROWS, False))
        np.testing.assert_array_equal(counts, arguments["counts"])
