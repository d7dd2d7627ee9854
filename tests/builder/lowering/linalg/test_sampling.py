"""Sampling as compiled for this CPU against the host's sampler, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.linalg.sampling import sample
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.components.sampling.device_sampling import sampling_fields
from shortfin_apps.llm.components.sampling.sampler import Sampler
from shortfin_apps.llm.contract.abi import NOT_FINITE, SamplingField
from tests.builder.compiled_kernels import load
from tests.components.engine_fixture import call

ROWS, K = 5, 8
ARGUMENTS = {
    "values": ((ROWS, K), "f32"),
    "indices": ((ROWS, K), "i64"),
    "sampling": ((len(SamplingField), ROWS), "i64"),
    "positions": ((ROWS,), "i64"),
}
HOST = Sampler(frozenset(), num_candidates=K)

Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    e = Emitter()
    tensors = [Tensor(f"%{name}", shape, dtype) for name, (shape, dtype) in ARGUMENTS.items()]
    token_ids = sample(e, *tensors)
    arguments = ", ".join(f"{t.name}: {t.type}" for t in tensors)
    lines = "\n".join([*e.lines, f"return {token_ids.name} : {token_ids.type}"])
    text = f"module @test {{\nfunc.func @run({arguments}) -> {token_ids.type} {{\n{lines}\n}}\n}}"
    return load(text, tmp_path_factory.mktemp("sampling"))


def on_device(compiled: Any, rows: list[Candidates], requests: list[Request]) -> list[int]:
    token_ids: Array = compiled.run(
        np.stack([row.values for row in rows]),
        np.stack([row.token_ids for row in rows]),
        np.array([sampling_fields(request, K) for request in requests], np.int64).T.copy(),
        np.array([len(request.token_ids) - 1 for request in requests], np.int64),
    ).to_host()
    return [int(token_id) for token_id in token_ids]


levels = st.lists(st.integers(-400, 400), min_size=K, max_size=K)
params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-30, 1e-3, 0.7, 1.0, 100.0]) | st.floats(0.0, 5.0),
        "top_k": st.integers(1, K),
        "top_p": st.sampled_from([1.0, 1e-300, 0.999999]) | st.floats(1e-6, 1.0),
        "min_p": st.sampled_from([0.0, 1.0, 1e-300]) | st.floats(0.0, 1.0),
        "seed": st.integers(0, 2**63 - 1),
    }
)
row_cases = st.tuples(
    levels, st.sampled_from([0.01, 1.0, 1e30]), params, st.integers(1, 9), st.integers(0, 2**12)
)


@settings(max_examples=150, deadline=None)
@given(st.lists(row_cases, min_size=ROWS, max_size=ROWS))
def test_tokens_are_those_of_the_host(compiled: Any, cases: list[Any]) -> None:
    rows, requests = [], []
    for values, unit, asked, num_prompt, num_generated in cases:
        ordered = -np.sort(-np.array(values, np.float32) * np.float32(unit))
        rows.append(Candidates(ordered, np.arange(K, dtype=np.int64) * 7919 % 509, None))
        request = Request(call("a", [1] * num_prompt, max_tokens=2**13, **asked))
        request.token_ids += [0] * num_generated
        requests.append(request)
    expected = [HOST.sample(row, request) for row, request in zip(rows, requests, strict=True)]
    assert on_device(compiled, rows, requests) == expected


def test_draws_follow_the_distribution(compiled: Any) -> None:
    row = Candidates(np.linspace(2, -1, K, dtype=np.float32), np.arange(K), None)
    counts = np.zeros(K)
    request = Request(call("a", [1], max_tokens=9999, temperature=1.0, top_k=6, seed=5))
    for _ in range(800):
        requests = []
        for _ in range(ROWS):
            one = Request(request.call)
            one.token_ids = list(request.token_ids)
            requests.append(one)
            request.token_ids.append(0)
        counts += np.bincount(on_device(compiled, [row] * ROWS, requests), minlength=K)
    expected = np.exp(row.values) * (np.arange(K) < 6)
    assert np.abs(counts / counts.sum() - expected / expected.sum()).max() < 0.02


@pytest.mark.parametrize("spoiled", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_no_token(compiled: Any, spoiled: float) -> None:
    good = Candidates(np.linspace(2, -1, K, dtype=np.float32), np.arange(K), None)
    bad = Candidates(np.full(K, spoiled, np.float32), np.arange(K), None)
    request = Request(call("a", [1], max_tokens=9, temperature=0.0))
    assert on_device(compiled, [good, bad, good, bad, good], [request] * ROWS) == [0, NOT_FINITE] * 2 + [0]


def test_minus_infinity_below_the_best_is_never_drawn(compiled: Any) -> None:
    values = np.full(K, -np.inf, np.float32)
    values[:2] = 1.0
    row = Candidates(values, np.arange(K), None)
    for seed in range(20):
        request = Request(call("a", [1], temperature=100.0, top_k=K, seed=seed))
        expected = HOST.sample(row, request)
        assert expected in (0, 1)
        assert on_device(compiled, [row] * ROWS, [request] * ROWS) == [expected] * ROWS
