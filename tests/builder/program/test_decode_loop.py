"""Decode loops against the decode entry of the same size with the host's sampler behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.components.sampling.device_sampling import sampling_fields
from shortfin_apps.llm.components.sampling.sampler import Sampler
from shortfin_apps.llm.contract.abi import NOT_FINITE
from tests.builder.compiled_model import NAN_BYTE, CompiledModel, Result, block_table
from tests.components.engine_fixture import call

pytestmark = pytest.mark.slow

ROWS, K, STEPS = 4, 8, 20
PROMPTS = (30, 15, 1)  # one row is padding
HOST = Sampler(frozenset(), num_candidates=K)
SLOTS = (6, 0, 3, 6)  # of each row; the padding row has another row's slot
UNUSED = -99  # in the table where no row has its token

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


@dataclass
class Looped:
    """Results of the steps of a loop: token ids [steps, ROWS], and the last step's candidates and logits."""

    token_ids: Ints
    result: Result


def looped(
    model: CompiledModel, requests: list[Request], blocks: Ints, steps: int, tokens: list[int] | None = None
) -> Looped:
    """Steps queued one behind the other, before the first result is read.

    `tokens`, if they are given, are those of the (then only) step, instead of the table's.
    """
    upload, download = model.device.upload, model.device.download
    used = len(requests)
    padding = [[0] * 6] * (ROWS - used)
    table = np.full(max(SLOTS) + 2, UNUSED)
    table[list(SLOTS[:used])] = [r.token_ids[-1] for r in requests]
    named = tokens or [-1 - slot for slot in SLOTS[:used]]
    given = upload(padded_column(named, 0))
    positions = upload(padded_column([len(r.token_ids) - 1 for r in requests], -1))
    sampling = upload(np.array([sampling_fields(r, K) for r in requests] + padding, np.int64).T)
    starts = padded_column([len(r.token_ids) - 1 for r in requests], 0)
    tables = [upload(each) for each in model.tables(starts, blocks)]
    last_tokens = upload(table)
    of_rows = [given, upload(np.array(SLOTS)), positions]
    arguments = [*of_rows, *tables, sampling, last_tokens, model.cache, *model.window_cache]
    queued = [model.program.submit(f"decode_loop_bs{ROWS}", arguments) for _ in range(steps)]
    results = [[download(each) for each in pending.wait()] for pending in queued]
    token_ids = np.stack([each[0] for each in results])
    expected = [len(r.token_ids) - 1 + steps for r in requests]
    assert download(positions).tolist() == padded_column(expected, -1).tolist()
    assert download(given).tolist() == padded_column(named, 0).tolist()
    for row in range(used):
        drawn = token_ids[:, row]
        table[SLOTS[row]] = next(iter(drawn[drawn >= 0][::-1]), table[SLOTS[row]])
    np.testing.assert_array_equal(download(last_tokens), table)
    return Looped(token_ids, Result(*(each[:used, 0] for each in results[-1][1:])))


def decoded(model: CompiledModel, requests: list[Request], blocks: Ints) -> Result:
    """The results of one step of the decode entry, for the rows in use."""
    tokens = padded_column([r.token_ids[-1] for r in requests], 0)[:, None]
    starts = padded_column([len(r.token_ids) - 1 for r in requests], 0)
    result = model.decode(f"decode_bs{ROWS}", tokens, starts, blocks)
    used = len(requests)
    return Result(result.values[:used], result.indices[:used], result.logits[:used])


def host_tokens(result: Result, requests: list[Request]) -> list[int]:
    """The host's choice for each row."""
    rows = [Candidates(v, i, None) for v, i in zip(result.values, result.indices, strict=True)]
    return [HOST.sample(row, request) for row, request in zip(rows, requests, strict=True)]


def assert_equal(one: Result, other: Result) -> None:
    for name in ("values", "indices", "logits"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_steps_queued_one_behind_the_other_are_those_of_the_host(model: CompiledModel) -> None:
    requests, blocks = prefilled(model)
    got = looped(model, requests, blocks, STEPS)
    looped_cache = model.read_cache().copy()
    model.fill_cache(NAN_BYTE)
    requests, blocks = prefilled(model)
    for step in range(STEPS):
        result = decoded(model, requests, blocks)
        for request, token_id in zip(requests, host_tokens(result, requests), strict=True):
            assert got.token_ids[step, int(request.request_id)] == token_id, (step, request.request_id)
            request.token_ids.append(token_id)
    assert_equal(got.result, result)
    np.testing.assert_array_equal(model.read_cache()[1:], looped_cache[1:])


def test_a_token_of_the_table_gives_the_bits_of_the_token(model: CompiledModel) -> None:
    requests, blocks = prefilled(model)
    read = looped(model, requests, blocks, 1)
    given = looped(model, requests, blocks, 1, [r.token_ids[-1] for r in requests])
    used = len(requests)
    np.testing.assert_array_equal(read.token_ids[:, :used], given.token_ids[:, :used])
    assert_equal(read.result, given.result)


def test_a_row_of_nan_has_no_token_and_spoils_no_other(model: CompiledModel) -> None:
    requests, blocks = prefilled(model)
    clean = looped(model, requests, blocks, 3).token_ids
    spoiled = blocks.copy()
    spoiled[1, 0] = 39  # a page that still is what the cache was filled with
    got = looped(model, requests, spoiled, 3).token_ids
    assert (got[:, 1] == NOT_FINITE).all()
    np.testing.assert_array_equal(got[:, [0, 2]], clean[:, [0, 2]])
