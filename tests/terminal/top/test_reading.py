from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.client import ServerError
from shortfin_apps.llm.terminal.top.reading import parsed

TEXT = """\
# TYPE a counter
a_total{x="1",y="p"} 2.0
a_total{x="1",y="q"} 3.0
a_total{x="2",y="q"} 4.0
# TYPE h histogram
h_bucket{le="0.5",m="one"} 1
h_bucket{le="+Inf",m="one"} 2
h_bucket{le="0.5",m="two"} 1
h_bucket{le="+Inf",m="two"} 1
"""

NO_FIGURES = ("a NaN", "a +Inf", "a -Inf", "a 1e300", 'h_bucket{le="x"} 1', 'h_bucket{le="NaN"} 1')


def test_samples_are_summed_over_the_labels_that_are_left_open() -> None:
    reading = parsed(TEXT, 1.0)
    assert reading.total("a_total") == 9
    assert reading.total("a_total", x="1") == 5
    assert reading.total("a_total", x="3") is None
    assert reading.total("b") is None
    assert reading.by_label("a_total", "y") == {"p": 2, "q": 7}
    assert reading.buckets("h") == {0.5: 2, math.inf: 3}


@pytest.mark.parametrize("line", NO_FIGURES)
def test_a_metric_with_a_sample_that_is_no_figure_is_left_out(line: str) -> None:
    name = line[0].replace("h", "h_bucket")
    reading = parsed(f'{TEXT}# TYPE a gauge\na{{x="1"}} 1\n{line}\nb 2\n', 0.0)
    assert reading.total(name) is None
    assert reading.total("b") == 2


@pytest.mark.parametrize("text", ["<html>", '{"error": 1}', "a{x= 1", "a b c d"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ServerError, match="Prometheus"):
        parsed(text, 0.0)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(ServerError):
        parsed(text, 0.0)
