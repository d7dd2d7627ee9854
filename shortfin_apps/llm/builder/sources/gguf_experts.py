"""Experts in GGUF files: one tensor holds all matrices of a layer, [experts, out, in], or all biases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gguf import ReaderTensor

from shortfin_apps.llm.builder.sources.metadata_limits import MAX_EXPERTS, check_at_most

_STACKED = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))_exps\.(weight|bias)")
_RANKS = {"weight": 3, "bias": 2}


def each_matrix(where: str, tensors: Iterable[ReaderTensor]) -> Iterator[ReaderTensor]:
    """Yield the tensors, splitting tensors of a layer's experts into one per expert, without copying.

    They have the names of older files, `blk.LAYER.ffn_gate.EXPERT.weight`. Raises BuildError for more experts
    than any model has; `where` names the file.
    """
    num_experts = 0
    for tensor in tensors:
        stacked = _STACKED.fullmatch(tensor.name)
        if stacked is None or len(tensor.shape) != _RANKS[stacked[2]]:
            yield tensor
            continue
        num_experts += len(tensor.data)  # unlimited by the file's size, if the experts are empty
        check_at_most(where, "its tensors hold {} experts", num_experts, MAX_EXPERTS)
        for expert, data in enumerate(tensor.data):
            yield tensor._replace(
                name=f"{stacked[1]}.{expert}.{stacked[2]}",
                shape=tensor.shape[:-1],
                n_elements=tensor.n_elements // len(tensor.data),
                n_bytes=data.nbytes,
                data_offset=tensor.data_offset + expert * data.nbytes,
                data=data,
            )
