"""Draws of tokens by a kernel class against the host's sampler, token by token, and what they store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.lowering import DrawState, LeftRows, LoweringContext
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.components.sampling.device_sampling import sampling_fields
from shortfin_apps.llm.components.sampling.sampler import Sampler
from shortfin_apps.llm.contract.abi import NOT_FINITE, SamplingField
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_model import TINY
from tests.builder.kernels.triton.launched import Body, Inputs, Launched
from tests.components.engine_fixture import call

ROWS = 200
UNUSED = np.full((ROWS, 512), np.nan)
UNITS = (0.0, 0.01, 1.0, 1e30)
TEMPERATURES = (0.0, 1e-30, 1e-3, 0.7, 1.0, 5.0, 100.0)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Draws:
    """The kernel classes of Sample and TopK on a device, and what launches them there."""

    device: str
    sampling: Callable[[LoweringContext], Any]
    top_k: Callable[[LoweringContext], Any]
    launch: Callable[[Inputs, Body, LoweringContext], Launched]

    def context(self, k: int, size: int) -> LoweringContext:
        """Of a model with `size` tokens."""
        spec, options = replace(TINY, vocab_size=size), BuildOptions(device=self.device, top_k=k)
        target = resolve_target(self.device)
        return LoweringContext(spec, options, target, WeightTypes(spec, options, target))


def program_of(k: int, draws: Draws, size: int = 512, rows: int = ROWS, left: int | None = None) -> Launched:
    """A program that draws from `rows` rows, in order, as a decode loop does; or from some of `left` rows.

    It returns the token ids and the table, and the positions after the draws of a loop.
    """
    context = draws.context(k, size)
    is_loop = left is None

    def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        values, indices, logits = (tensors[name] for name in ("values", "indices", "logits"))
        drawn_from = LeftRows(values, indices, logits, tensors.get("row_indices"))
        state = DrawState(*(tensors[name] for name in ("slots", "positions", "sampling", "last_tokens")))
        token_ids, state = draws.sampling(context).sample(e, drawn_from, state, advances=is_loop)
        return [token_ids, state.last_tokens, *([state.positions] if is_loop else [])]

    any_rows: tuple[int | str, ...] = (rows,) if is_loop else ("left", 1)
    inputs: dict[str, tuple[str, tuple[int | str, ...]]] = {
        "values": ("f32", (*any_rows, k)),
        "indices": ("i64", (*any_rows, k)),
        "logits": ("f32", (*any_rows, size)),
        **({} if is_loop else {"row_indices": ("i64", (rows,))}),
        "slots": ("i64", (rows,)),
        "positions": ("i64", (rows,)),
        "sampling": ("i64", (len(SamplingField), rows)),
        "last_tokens": ("i64", ("slots",)),
    }
    return draws.launch(inputs, body, context)


def slots_of(rows: int) -> Ints:
    """Distinct slots in no order, and a table with more of them, that has no token yet."""
    return np.random.default_rng(rows).permutation(rows + 9)[:rows]


def unused(rows: int) -> Ints:
    return np.arange(rows + 9) - 1000


def assert_stored(table: Ints, slots: Ints, token_ids: Ints, stores: npt.NDArray[np.bool_]) -> None:
    """That the tokens of rows which store any are in the table, and that nothing else of it has changed."""
    expected = unused(len(slots))
    expected[slots[stores]] = token_ids[stores]
    np.testing.assert_array_equal(table, expected)


def cases(k: int) -> tuple[Floats, Ints, list[Request]]:
    """Candidates of each row, and a request that asks for a token of them."""
    rng = np.random.default_rng(k)
    levels = -np.sort(-rng.integers(-400, 400, (ROWS, k)), axis=1)
    values = (levels * rng.choice(UNITS, (ROWS, 1))).astype(np.float32)
    indices = np.stack([rng.permutation(512)[:k] for _ in range(ROWS)])
    requests = []
    for row in range(ROWS):
        request = Request(
            call(
                str(row),
                [1] * int(rng.integers(1, 9)),
                max_tokens=2**13,
                temperature=float(rng.choice(TEMPERATURES)),
                top_k=int(rng.integers(1, k + 1)),
                top_p=float(rng.choice([1.0, 1e-300, 0.999999, rng.random() + 1e-6])),
                min_p=float(rng.choice([0.0, 1.0, 1e-300, rng.random()])),
                seed=int(rng.integers(0, 2**63)),
            )
        )
        request.token_ids += [0] * int(rng.integers(0, 4000))
        requests.append(request)
    return values, indices, requests


def fields_of(requests: list[Request], k: int) -> Ints:
    return np.array([sampling_fields(request, k, draws_rows=True) for request in requests]).T


WHOLE = 40  # rows
TOP_PS = (1.0, 1.0, 0.95, 0.5, 0.02, 1e-300)
MIN_PS = (0.0, 0.0, 0.02, 0.5)


def whole_rows(size: int, k: int) -> tuple[Floats, list[Request]]:
    """Logits, many of which are equal in some rows, and a request for each row; every fourth has a top_k."""
    rng = np.random.default_rng(size)
    spread = rng.choice([0.0, 0.5, 3.0], (WHOLE, 1))
    logits = (rng.normal(0, 1, (WHOLE, size)) * spread).astype(np.float32)
    logits[::3] = np.round(logits[::3] * 4) / 4
    logits[:, :3] = -np.inf
    requests = []
    for row in range(WHOLE):
        request = Request(
            call(
                str(row),
                [1] * int(rng.integers(1, 9)),
                max_tokens=2**13,
                temperature=float(rng.choice([1e-3, 0.7, 1.0, 5.0])),
                top_k=int(rng.integers(1, k + 1)) if row % 4 == 3 else 0,
                top_p=float(rng.choice(TOP_PS)),
                min_p=float(rng.choice(MIN_PS)),
                seed=int(rng.integers(0, 2**63)),
            )
        )
        request.token_ids += [0] * int(rng.integers(0, 4000))
        requests.append(request)
    return logits, requests


def best_of(logits: Floats, k: int) -> tuple[Floats, Ints]:
    indices = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(logits, indices, axis=1), indices


class DrawTests:
    """Tests of a kernel class; the fixture `draws` has it."""

    @pytest.mark.parametrize("k", [1, 5, 64])
    def test_tokens_are_those_of_the_host(self, k: int, draws: Draws) -> None:
        values, indices, requests = cases(k)
        host = Sampler(frozenset(), num_candidates=k)
        expected = [
            host.sample(Candidates(values[row], indices[row], None), request)
            for row, request in enumerate(requests)
        ]
        positions = np.array([len(request.token_ids) - 1 for request in requests])
        fields = fields_of(requests, k)
        slots = slots_of(ROWS)
        got = program_of(k, draws)(
            values=values,
            indices=indices,
            logits=UNUSED,
            sampling=fields,
            slots=slots,
            positions=positions,
            last_tokens=unused(ROWS),
        )
        np.testing.assert_array_equal(got[0], expected)
        assert_stored(got[1], slots, got[0], np.full(ROWS, True))
        np.testing.assert_array_equal(got[2], positions + 1)

    def test_padding_spoiled_rows_and_those_without_a_slot_store_nothing(self, draws: Draws) -> None:
        values, indices, requests = cases(8)
        spoiled = {0: np.nan, 1: np.inf, 2: -np.inf}
        for row, value in spoiled.items():
            values[row] = value
        positions = np.array([len(request.token_ids) - 1 for request in requests])
        positions[100:] = -1
        fields = fields_of(requests, 8)
        fields[:, 100:] = 0
        slots = slots_of(ROWS)
        slots[90:95] = -1
        slots[100:] = slots[50]
        token_ids, table, after = program_of(8, draws)(
            values=values,
            indices=indices,
            logits=UNUSED,
            sampling=fields,
            slots=slots,
            positions=positions,
            last_tokens=unused(ROWS),
        )
        assert token_ids[:3].tolist() == [NOT_FINITE] * 3
        assert_stored(table, slots, token_ids, (token_ids >= 0) & (positions >= 0) & (slots >= 0))
        np.testing.assert_array_equal(after[:100], positions[:100] + 1)
        np.testing.assert_array_equal(after[100:], -1)

    @pytest.mark.parametrize(("size", "k"), [(67, 64), (5003, 64), (5003, 5), (2048, 1)])
    def test_tokens_of_whole_rows_are_those_of_the_host(self, size: int, k: int, draws: Draws) -> None:
        """Beside rows that have a top-k."""
        logits, requests = whole_rows(size, k)
        values, indices = best_of(logits, k)
        host = Sampler(frozenset(), num_candidates=k)
        expected = [
            host.sample(Candidates(values[row], indices[row], logits[row]), request)
            for row, request in enumerate(requests)
        ]
        positions = np.array([len(request.token_ids) - 1 for request in requests])
        slots = slots_of(WHOLE)
        token_ids, table, after = program_of(k, draws, size, WHOLE)(
            values=values,
            indices=indices,
            logits=logits,
            sampling=fields_of(requests, k),
            slots=slots,
            positions=positions,
            last_tokens=unused(WHOLE),
        )
        np.testing.assert_array_equal(token_ids, expected)
        assert_stored(table, slots, token_ids, np.full(WHOLE, True))
        np.testing.assert_array_equal(after, positions + 1)

    def test_rows_that_another_entry_left_are_drawn_from(self, draws: Draws) -> None:
        """In any order, and some not at all; with and without a top-k.

        A spoiled row has no token, and padding does no harm.
        """
        size, k, used = 3001, 8, 9
        logits, requests = whole_rows(size, k)
        logits[8] = np.nan
        values, indices = best_of(logits, k)
        row_indices = np.array([32, 8, 0, 3, 2, 20, 23, 22, 38, 0, 0, 0])
        chosen = [requests[row] for row in row_indices[:used]]
        fields = np.zeros((len(SamplingField), len(row_indices)), np.int64)
        fields[:, :used] = fields_of(chosen, k)
        positions = np.full(len(row_indices), -1)
        positions[:used] = [len(request.token_ids) - 1 for request in chosen]

        slots = slots_of(len(row_indices))
        got, table = program_of(k, draws, size, len(row_indices), left=WHOLE)(
            values=values[:, None],
            indices=indices[:, None],
            logits=logits[:, None],
            row_indices=row_indices,
            slots=slots,
            positions=positions,
            sampling=fields,
            last_tokens=unused(len(row_indices)),
        )
        assert_stored(table, slots, got, (got >= 0) & (positions >= 0))
        host = Sampler(frozenset(), num_candidates=k)
        for drawn, row in zip(got[:used], row_indices[:used], strict=True):
            if row == 8:
                assert drawn == NOT_FINITE
                continue
            expected = host.sample(Candidates(values[row], indices[row], logits[row]), requests[row])
            assert drawn == expected
