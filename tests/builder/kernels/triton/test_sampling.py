"""Sampling by a Triton kernel against the host's sampler, token by token, and the state that it leaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.lowering import LeftRows, LoopState, LoweringContext
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.components.sampling.device_sampling import sampling_fields
from shortfin_apps.llm.components.sampling.sampler import Sampler
from shortfin_apps.llm.contract.abi import NOT_FINITE, SamplingField
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_model import TINY
from tests.builder.kernels.triton.conftest import Launch, context_of
from tests.builder.kernels.triton.launched import Launched
from tests.components.engine_fixture import call
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton.sampling import TritonSampling

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(300)]

ROWS = 200
UNUSED = np.full((ROWS, 512), np.nan)
UNITS = (0.0, 0.01, 1.0, 1e30)
TEMPERATURES = (0.0, 1e-30, 1e-3, 0.7, 1.0, 5.0, 100.0)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def program_of(k: int, chip: str, launch: Launch, size: int = 512, rows: int = ROWS) -> Launched:
    context = sampling_context(k, chip, size)

    def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        state = LoopState(tensors["tokens"], tensors["positions"], tensors["sampling"])
        values, indices, logits = (tensors[name] for name in ("values", "indices", "logits"))
        token_ids, state = TritonSampling(context).sample(e, values, indices, logits, state)
        return [token_ids, state.tokens, state.positions]

    inputs: dict[str, tuple[str, tuple[int | str, ...]]] = {
        "values": ("f32", (rows, k)),
        "indices": ("i64", (rows, k)),
        "logits": ("f32", (rows, size)),
        "sampling": ("i64", (len(SamplingField), rows)),
        "tokens": ("i64", (rows,)),
        "positions": ("i64", (rows,)),
    }
    return launch(inputs, body, context)


def sampling_context(k: int, chip: str, size: int) -> LoweringContext:
    return context_of(replace(TINY, vocab_size=size), chip, BuildOptions(device=f"hip:{chip}", top_k=k))


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


@pytest.mark.parametrize("k", [1, 5, 64])
def test_tokens_are_those_of_the_host(k: int, chip: str, launch: Launch) -> None:
    values, indices, requests = cases(k)
    host = Sampler(frozenset(), num_candidates=k)
    expected = [
        host.sample(Candidates(values[row], indices[row], None), request)
        for row, request in enumerate(requests)
    ]
    positions = np.array([len(request.token_ids) - 1 for request in requests])
    fields = fields_of(requests, k)
    last = np.full(ROWS, 7)
    got = program_of(k, chip, launch)(
        values=values,
        indices=indices,
        logits=UNUSED,
        sampling=fields,
        tokens=last,
        positions=positions,
    )
    np.testing.assert_array_equal(got[0], expected)
    np.testing.assert_array_equal(got[1], expected)
    np.testing.assert_array_equal(got[2], positions + 1)


def test_padding_and_spoiled_rows_keep_their_state(chip: str, launch: Launch) -> None:
    values, indices, requests = cases(8)
    spoiled = {0: np.nan, 1: np.inf, 2: -np.inf}
    for row, value in spoiled.items():
        values[row] = value
    positions = np.array([len(request.token_ids) - 1 for request in requests])
    positions[100:] = -1
    fields = fields_of(requests, 8)
    fields[:, 100:] = 0
    last = np.arange(ROWS) + 1000
    token_ids, tokens, after = program_of(8, chip, launch)(
        values=values,
        indices=indices,
        logits=UNUSED,
        sampling=fields,
        tokens=last,
        positions=positions,
    )
    assert token_ids[:3].tolist() == [NOT_FINITE] * 3
    np.testing.assert_array_equal(tokens[:3], last[:3])
    np.testing.assert_array_equal(tokens[3:100], token_ids[3:100])
    np.testing.assert_array_equal(tokens[100:], last[100:])
    np.testing.assert_array_equal(after[:100], positions[:100] + 1)
    np.testing.assert_array_equal(after[100:], -1)


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


@pytest.mark.parametrize(("size", "k"), [(67, 64), (5003, 64), (5003, 5), (2048, 1)])
def test_tokens_of_whole_rows_are_those_of_the_host(size: int, k: int, chip: str, launch: Launch) -> None:
    """Beside rows that have a top-k."""
    logits, requests = whole_rows(size, k)
    values, indices = best_of(logits, k)
    host = Sampler(frozenset(), num_candidates=k)
    expected = [
        host.sample(Candidates(values[row], indices[row], logits[row]), request)
        for row, request in enumerate(requests)
    ]
    positions = np.array([len(request.token_ids) - 1 for request in requests])
    token_ids, tokens, after = program_of(k, chip, launch, size, WHOLE)(
        values=values,
        indices=indices,
        logits=logits,
        sampling=fields_of(requests, k),
        tokens=np.full(WHOLE, 7),
        positions=positions,
    )
    np.testing.assert_array_equal(token_ids, expected)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(after, positions + 1)


def test_rows_that_another_entry_left_are_drawn_from(chip: str, launch: Launch) -> None:
    """In any order, and some not at all; a spoiled row has no token, and padding does no harm."""
    size, k, used = 3001, 8, 9
    context = sampling_context(k, chip, size)
    logits, requests = whole_rows(size, k)
    logits[8] = np.nan
    values, indices = best_of(logits, k)
    row_indices = np.array([32, 8, 0, 1, 2, 20, 21, 22, 38, 0, 0, 0])
    chosen = [requests[row] for row in row_indices[:used]]
    fields = np.zeros((len(SamplingField), len(row_indices)), np.int64)
    fields[:, :used] = fields_of(chosen, k)
    positions = np.full(len(row_indices), -1)
    positions[:used] = [len(request.token_ids) - 1 for request in chosen]

    def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        return [TritonSampling(context).draw_rows(e, LeftRows(**tensors))]

    inputs: dict[str, tuple[str, tuple[int | str, ...]]] = {
        "values": ("f32", ("left", 1, k)),
        "logits": ("f32", ("left", 1, size)),
        "row_indices": ("i64", (len(row_indices),)),
        "positions": ("i64", (len(row_indices),)),
        "sampling": ("i64", fields.shape),
    }
    [got] = launch(inputs, body, context)(
        values=values[:, None],
        logits=logits[:, None],
        row_indices=row_indices,
        positions=positions,
        sampling=fields,
    )
    host = Sampler(frozenset(), num_candidates=k)
    for drawn, row in zip(got[:used], row_indices[:used], strict=True):
        if row == 8:
            assert drawn == NOT_FINITE
            continue
        expected = host.sample(Candidates(values[row], indices[row], logits[row]), requests[row])
        assert drawn == expected
