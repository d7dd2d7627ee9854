"""Encodes a request's sampling parameters for the device: a column of the `sampling` argument (`abi.py`)."""

from __future__ import annotations

from array import array

import numpy as np

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.sampling.weights import least_weight, scale_of, share_of
from shortfin_apps.llm.contract.abi import NO_TOP_K, SamplingField


def device_fields(request: Request, num_candidates: int, *, draws_rows: bool) -> array[int]:
    """Return the request's `sampling_fields`, which are computed once."""
    if request.device_fields is None:
        request.device_fields = sampling_fields(request, num_candidates, draws_rows=draws_rows)
    return request.device_fields


def sampling_fields(request: Request, num_candidates: int, *, draws_rows: bool = False) -> array[int]:
    """Return the i64 values in the order of SamplingField. `num_candidates` is the K of the VMFB's top-k.

    Greedy is encoded as a top-k of 1. A request without top-k is drawn from the full row if the device
    `draws_rows`, else from the K candidates.
    """
    params = request.call.params
    scale = np.float32(0) if params.greedy else scale_of(params.temperature)
    fields = {
        SamplingField.SCALE: int(scale.view(np.int32)),
        SamplingField.TOP_K: _top_k(params, NO_TOP_K if draws_rows else num_candidates),
        SamplingField.SHARE: share_of(params.top_p),
        SamplingField.LEAST_WEIGHT: least_weight(params.min_p),
        SamplingField.SEED: request.seed,
        SamplingField.PROMPT_LENGTH: len(request.call.prompt_token_ids),
    }
    return array("q", [fields[field] for field in SamplingField])


def _top_k(params: SamplingParams, off: int) -> int:
    return 1 if params.greedy else params.top_k or off
