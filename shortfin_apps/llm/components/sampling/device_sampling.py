"""How a request is sampled on the device: a row of a decode loop's `sampling` argument (`abi.py`)."""

from __future__ import annotations

import numpy as np

from shortfin_apps.llm.abi import SamplingColumn
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.weights import least_weight, scale_of, share_of


def sampling_row(request: Request, num_candidates: int) -> list[int]:
    """The row, by column; `num_candidates` is the K of the VMFB's top-k. Greedy is a top-k of one."""
    params = request.call.params
    scale = np.float32(0) if params.greedy else scale_of(params.temperature)
    columns = {
        SamplingColumn.SCALE: int(scale.view(np.int32)),
        SamplingColumn.TOP_K: 1 if params.greedy else min(params.top_k or num_candidates, num_candidates),
        SamplingColumn.SHARE: share_of(params.top_p),
        SamplingColumn.LEAST_WEIGHT: least_weight(params.min_p),
        SamplingColumn.SEED: request.seed,
        SamplingColumn.PROMPT_LENGTH: len(request.call.prompt_token_ids),
    }
    return [columns[column] for column in SamplingColumn]
