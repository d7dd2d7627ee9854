"""Decode loops against the decode entry of the same size with the host's sampler behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.components.sampling.device_sampling import sampling_fields
from shortfin_apps.llm.components.sampling.sampler import Sampler
from shortfin_apps.llm.contract.abi import NOT_FINITE
from tests.builder.compiled_model import NAN_BYTE, CompiledModel, block_table
from tests.components.engine_fixture import call

pytestmark = pytest.mark.slow

ROWS, K, STEPS = 4, 8, 20
PROMPTS = (30, 15, 1)  # one row is padding
HOST = Sampler(frozenset(), num_candidates=K)

Ints = npt.NDArray[np.int64]


@pytest.fixture(params=["f32", "bf16", "int8", "windowed"])
def model(request: pytest.FixtureRequest, models: dict[str, CompiledModel]) -> CompiledModel:
    chosen: CompiledModel = models[request.param]
    chosen.fill_cache(NAN_BYTE)
    return chosen


def prefilled(model: CompiledModel) -> tuple[list[Request], Ints]:
    """A request for each row in use, its prompt but the last token in the cache; and the block table."""
    rng = np.random.default_rng(1)
    blocks = block_table(rng, [-(-(n + STEPS) // 16) for n in PROMPTS] + [0] * (ROWS - len(PROMPTS)), 5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 5},
        {"top_k": K, "top_p": 0.8, "min_p": 0.1},
    ]
    requests = []
    for row, (length, params) in enumerate(zip(PROMPTS, kinds, strict=True)):
        prompt = rng.integers(0, model.spec.vocab_size, length).tolist()
        requests.append(Request(call(str(row), prompt, max_tokens=99, seed=row + 7, **params)))
        padded = np.zeros((1, 32), np.int64)
        padded[0, :length] = prompt
        model.prefill("prefill_bs1", padded, np.array([0]), np.array([length]), blocks[row : row + 1])
    return requests, blocks


def padded_column(values: list[int], padding: int) -> Ints:
    return np.array(values + [padding] * (ROWS - len(values)), np.int64)


def loop_tokens(model: CompiledModel, requests: list[Request], blocks: Ints, steps: int) -> Ints:
    """[steps, ROWS]: queued one behind the other, before the first result is read."""
    upload = model.device.upload
    padding = [[0] * 6] * (ROWS - len(requests))
    state = [
        upload(padded_column([r.token_ids[-1] for r in requests], 0)),
        upload(padded_column([len(r.token_ids) - 1 for r in requests], -1)),
    ]
    sampling = upload(np.array([sampling_fields(r, K) for r in requests] + padding, np.int64).T)
    starts = padded_column([len(r.token_ids) - 1 for r in requests], 0)
    tables = [upload(table) for table in model.tables(starts, blocks)]
    arguments = [*state, *tables, sampling, model.cache, *model.window_cache]
    queued = [model.program.submit(f"decode_loop_bs{ROWS}", arguments) for _ in range(steps)]
    results = [pending.wait()[0] for pending in queued]
    token_ids = np.stack([model.device.download(result) for result in results])
    tokens, positions = map(model.device.download, state)
    expected = [len(r.token_ids) - 1 + steps for r in requests]
    assert positions.tolist() == padded_column(expected, -1).tolist()
    used = len(requests)
    np.testing.assert_array_equal(tokens[:used], np.where(token_ids >= 0, token_ids, tokens)[-1, :used])
    assert not tokens[used:].any()
    return token_ids


def host_tokens(model: CompiledModel, requests: list[Request], blocks: Ints) -> list[int]:
    """One step of the decode entry, and the host's choice for each row."""
    tokens = padded_column([r.token_ids[-1] for r in requests], 0)[:, None]
    starts = padded_column([len(r.token_ids) - 1 for r in requests], 0)
    result = model.decode(f"decode_bs{ROWS}", tokens, starts, blocks)
    rows = [Candidates(v, i, None) for v, i in zip(result.values, result.indices, strict=True)]
    return [HOST.sample(row, request) for row, request in zip(rows, requests, strict=False)]


def test_steps_queued_one_behind_the_other_are_those_of_the_host(model: CompiledModel) -> None:
    requests, blocks = prefilled(model)
    got = loop_tokens(model, requests, blocks, STEPS)
    looped_cache = model.read_cache().copy()
    model.fill_cache(NAN_BYTE)
    requests, blocks = prefilled(model)
    for step in range(STEPS):
        for request, token_id in zip(requests, host_tokens(model, requests, blocks), strict=True):
            assert got[step, int(request.request_id)] == token_id, (step, request.request_id)
            request.token_ids.append(token_id)
    np.testing.assert_array_equal(model.read_cache()[1:], looped_cache[1:])


def test_a_row_of_nan_has_no_token_and_spoils_no_other(model: CompiledModel) -> None:
    requests, blocks = prefilled(model)
    clean = loop_tokens(model, requests, blocks, 3)
    spoiled = blocks.copy()
    spoiled[1, 0] = 39  # a page that still is what the cache was filled with
    got = loop_tokens(model, requests, spoiled, 3)
    assert (got[:, 1] == NOT_FINITE).all()
    np.testing.assert_array_equal(got[:, [0, 2]], clean[:, [0, 2]])
