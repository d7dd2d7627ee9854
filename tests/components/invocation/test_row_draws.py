from __future__ import annotations

from shortfin_apps.llm.components.invocation.row_draws import RowDraw, padded_draws


def test_padding_is_of_row_0_at_position_minus_1() -> None:
    draws = [RowDraw(3, 17, [1, 2, 3, 4, 5, 6]), RowDraw(1, 4, [7] * 6)]
    padded = padded_draws(3, draws)
    assert padded["row_indices"].tolist() == [3, 1, 0]
    assert padded["positions"].tolist() == [17, 4, -1]
    assert padded["sampling"].T.tolist() == [[1, 2, 3, 4, 5, 6], [7] * 6, [0] * 6]
