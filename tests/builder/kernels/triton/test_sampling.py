"""Sampling by a Triton kernel against the host's sampler, token by token, and the state that it leaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.abi import NOT_FINITE, SamplingField
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.lowering import LoopState
from shortfin_apps.llm.builder.model.spec import BuildOptions
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.components.sampling.device_sampling import sampling_fields
from shortfin_apps.llm.components.sampling.sampler import Sampler
from tests.builder.compiled_model import TINY
from tests.builder.kernels.triton.conftest import Launch, context_of
from tests.builder.kernels.triton.launched import Launched
from tests.components.engine_fixture import call
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton.sampling import TritonSampling

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(300)]

ROWS = 200
UNITS = (0.0, 0.01, 1.0, 1e30)
TEMPERATURES = (0.0, 1e-30, 1e-3, 0.7, 1.0, 5.0, 100.0)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def program_of(k: int, chip: str, launch: Launch) -> Launched:
    context = context_of(replace(TINY, vocab_size=512), chip, BuildOptions(device=f"hip:{chip}", top_k=k))

    def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        state = LoopState(tensors["tokens"], tensors["positions"], tensors["sampling"])
        token_ids, state = TritonSampling(context).sample(e, tensors["values"], tensors["indices"], state)
        return [token_ids, state.tokens, state.positions]

    inputs: dict[str, tuple[str, tuple[int | str, ...]]] = {
        "values": ("f32", (ROWS, k)),
        "indices": ("i64", (ROWS, k)),
        "sampling": ("i64", (len(SamplingField), ROWS)),
        "tokens": ("i64", (ROWS,)),
        "positions": ("i64", (ROWS,)),
    }
    return launch(inputs, body, context)


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


@pytest.mark.parametrize("k", [1, 5, 64])
def test_tokens_are_those_of_the_host(k: int, chip: str, launch: Launch) -> None:
    values, indices, requests = cases(k)
    host = Sampler(frozenset(), num_candidates=k)
    expected = [
        host.sample(Candidates(values[row], indices[row], None), request)
        for row, request in enumerate(requests)
    ]
    positions = np.array([len(request.token_ids) - 1 for request in requests])
    fields = np.array([sampling_fields(request, k) for request in requests]).T
    last = np.full(ROWS, 7)
    got = program_of(k, chip, launch)(
        values=values, indices=indices, sampling=fields, tokens=last, positions=positions
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
    fields = np.array([sampling_fields(request, 8) for request in requests]).T
    fields[:, 100:] = 0
    last = np.arange(ROWS) + 1000
    token_ids, tokens, after = program_of(8, chip, launch)(
        values=values, indices=indices, sampling=fields, tokens=last, positions=positions
    )
    assert token_ids[:3].tolist() == [NOT_FINITE] * 3
    np.testing.assert_array_equal(tokens[:3], last[:3])
    np.testing.assert_array_equal(tokens[3:100], token_ids[3:100])
    np.testing.assert_array_equal(tokens[100:], last[100:])
    np.testing.assert_array_equal(after[:100], positions[:100] + 1)
    np.testing.assert_array_equal(after[100:], -1)
