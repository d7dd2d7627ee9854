"""The standard errors and the windows of bench/perplexity.py."""

from __future__ import annotations

import numpy as np
import pytest

from bench.perplexity import Scores, cut

FIRST = Scores(np.log(np.full((2, 2), 0.5)), np.zeros((2, 2), np.int64))


def test_differences_have_standard_errors_over_tokens_and_over_windows() -> None:
    """Differences of 0.01 and 0.03 in one window, 0.03 and 0.05 in the other: windows differ by 0.02."""
    lost = np.array([[0.01, 0.03], [0.03, 0.05]])
    change, tokens, windows, _ = Scores(FIRST.logprobs - lost, FIRST.best).compared(FIRST).split(" | ")
    assert change == "+3.045%"  # exp(0.03) - 1
    assert tokens == "0.816%"  # sqrt(0.0008 / 3 / 4)
    assert windows == "1.000%"  # 0.02 / 2


def test_one_window_has_no_standard_error_over_windows() -> None:
    first = Scores(FIRST.logprobs[:1], FIRST.best[:1])
    assert first.compared(first) == "+0.000% | 0.000% | nan% | 100.0%"


def test_the_share_of_equal_best_tokens_is_of_all_tokens() -> None:
    other = Scores(FIRST.logprobs, np.array([[0, 0], [0, 7]]))
    assert other.compared(FIRST).endswith("| 75.0%")


def test_perplexity_is_of_all_tokens() -> None:
    assert FIRST.perplexity == pytest.approx(2)


def test_windows_are_spread_over_the_text_and_begin_as_prompts_do() -> None:
    assert cut(range(10, 21), [1], 2, 4).tolist() == [[1, 10, 11, 12], [1, 15, 16, 17]]
