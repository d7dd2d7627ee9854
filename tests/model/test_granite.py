from __future__ import annotations

from dataclasses import replace

import numpy as np

from shortfin_apps.llm.model.granite import Multipliers
from tests.builder.compiled_model import TINY


def test_neutral_multipliers_change_nothing() -> None:
    assert Multipliers().applied(TINY) == TINY
    assert Multipliers(attention=TINY.attention.head_dim**-0.5).applied(TINY) == TINY


def test_a_divided_stream_has_the_norms_of_the_whole_one() -> None:
    residual = 0.22
    spec = Multipliers(residual=residual, embedding=12.0).applied(replace(TINY, rms_norm_eps=0.1))
    x = np.random.default_rng(0).standard_normal(64)
    whole = x / np.sqrt(np.mean(x * x) + 0.1)
    divided = x / residual
    np.testing.assert_allclose(divided / np.sqrt(np.mean(divided**2) + spec.rms_norm_eps), whole)
    assert spec.embedding_scale == 12.0 / residual
