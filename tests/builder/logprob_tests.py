"""Terms of log-probabilities that a kernel class computes, against the host's, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.lowering import ChosenRows
from shortfin_apps.llm.components.sampling.logprobs import computed_terms, terms_of, token_logprobs
from shortfin_apps.llm.contract.abi import TermField
from tests.builder.draw_tests import Draws, Floats, best_of, slots_of, unused
from tests.builder.kernels.triton.launched import Launched

LEFT, ROWS, PADDING = 30, 64, 5


def launched(size: int, k: int, draws: Draws) -> Launched:
    context = draws.context(k, size)

    def body(e: Emitter, tensors: dict[str, Tensor]) -> list[Tensor]:
        made = draws.sampling(context).logprobs(e, ChosenRows(**tensors))
        return [made.terms, made.top_values, made.top_indices]

    inputs: dict[str, tuple[str, tuple[int | str, ...]]] = {
        "values": ("f32", ("left", 1, k)),
        "indices": ("i64", ("left", 1, k)),
        "logits": ("f32", ("left", 1, size)),
        "row_indices": ("i64", (ROWS,)),
        "slots": ("i64", (ROWS,)),
        "last_tokens": ("i64", ("slots",)),
    }
    return draws.launch(inputs, body, context)


def some_logits(rng: np.random.Generator, size: int) -> Floats:
    """Wide and narrow rows, rows with many ties, and some tokens that are banned."""
    spread = rng.choice([0.0, 0.1, 3.0, 30.0], (LEFT, 1))
    logits: Floats = (rng.normal(0, 1, (LEFT, size)) * spread).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    logits[:, 5:9] = -np.inf
    return logits


def given(logits: Floats, k: int, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    """The arguments, with a token for each row but the last ones, which are padding."""
    values, indices = best_of(logits, k)
    used = ROWS - PADDING
    slots, row_indices, table = slots_of(ROWS), np.zeros(ROWS, np.int64), unused(ROWS)
    row_indices[:used] = rng.integers(0, LEFT, used)
    slots[used:] = -1
    table[slots[:used]] = rng.integers(0, logits.shape[1], used)
    return {
        "values": values[:, None],
        "indices": indices[:, None],
        "logits": logits[:, None],
        "row_indices": row_indices,
        "slots": slots,
        "last_tokens": table,
    }


class LogprobTests:
    """Tests of a kernel class; the fixture `draws` has it."""

    @pytest.mark.parametrize(("size", "k"), [(67, 64), (5003, 5), (2048, 1)])
    def test_terms_are_those_of_the_host(self, size: int, k: int, draws: Draws) -> None:
        """Sizes are multiples of a part, or not; tokens are candidates, or not, or banned."""
        rng = np.random.default_rng(size)
        logits = some_logits(rng, size)
        arguments = given(logits, k, rng)
        terms, values, indices = launched(size, k, draws)(**arguments)
        of_rows = computed_terms(terms, values, indices)
        for row, found in enumerate(of_rows[:-PADDING]):
            of_row = logits[arguments["row_indices"][row]]
            token_id = int(arguments["last_tokens"][arguments["slots"][row]])
            expected = terms_of(of_row, token_id, k)
            assert (found.mass, found.logit, found.rank) == (expected.mass, expected.logit, expected.rank)
            assert token_logprobs(found, k) == token_logprobs(expected, k)

    def test_a_row_does_not_depend_on_the_others(self, draws: Draws) -> None:
        size, k = 5003, 8
        rng = np.random.default_rng(0)
        logits = some_logits(rng, size)
        arguments = given(logits, k, rng)
        program = launched(size, k, draws)
        before = program(**arguments)
        kept = int(arguments["row_indices"][7])
        others = np.arange(LEFT) != kept
        arguments["logits"][others] = np.nan
        arguments["values"][others] = np.nan
        arguments["last_tokens"][arguments["slots"][8]] = size + 3  # of no row's vocabulary
        after = program(**arguments)
        for row in np.flatnonzero(arguments["row_indices"][:-PADDING] == kept):
            if row != 8:
                np.testing.assert_array_equal(after[0][:, row], before[0][:, row])
                np.testing.assert_array_equal(after[1][row], before[1][row])

    def test_padding_has_the_mass_of_row_0(self, draws: Draws) -> None:
        rng = np.random.default_rng(3)
        logits = some_logits(rng, 67)
        terms, values, _ = launched(67, 8, draws)(**given(logits, 8, rng))
        expected = terms_of(logits[0], 0, 8)
        assert terms[TermField.MASS, -PADDING:].tolist() == [expected.mass] * PADDING
        np.testing.assert_array_equal(values[-PADDING:], [expected.values] * PADDING)
