"""Computes sequences with a compiled model and compares the logits with the numpy reference's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.builder.weights.chosen_layout import multiplies_blocks
from shortfin_apps.llm.model.reference.forward import forward
from tests.builder.compiled_model import HOST, CompiledModel, Result

STRIDE = 16
# Logits have a standard deviation of about 1. bf16 keeps 8 bits of every activation and of K and V, which
# the reference does not: over 600 random prompts the largest error was 0.05, and 6e-6 in f32. int8 keeps a
# 254th of a token's largest activation, and blocks one of the largest of 32.
TOLERANCE_OF_BLOCKS = 0.2  # multiplied as integers
TOLERANCE = {"f32": 3e-5, "f16": 1e-2, "bf16": 0.1, "int8": 0.3}
# Of K and V in bytes, which the reference rounds too: an f32's last bit may decide to which of two.
QUANTISED_CACHE_TOLERANCE = 3e-3
Tokens = npt.NDArray[np.int64]


def pages_for(length: int) -> int:
    return -(-length // STRIDE)


def prefill_row(
    model: CompiledModel, tokens: Tokens, blocks: Tokens, chunk: int, entry: str = "prefill_bs1"
) -> Result:
    """Prefills one sequence in chunks of `chunk` tokens (the last one shorter, padded to the stride)."""
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        padded = np.zeros((1, pages_for(len(part)) * STRIDE), np.int64)
        padded[0, : len(part)] = part
        result = model.prefill(entry, padded, np.array([start]), np.array([start + len(part)]), blocks)
    return result


def expect(model: CompiledModel, logits: npt.NDArray[np.float32], tokens: Tokens) -> None:
    """`logits` [vocab] are the reference's for the last of `tokens`."""
    is_quantised = model.options.kv == "q8_0"
    expected = forward(model.spec, model.weights, tokens, has_quantised_cache=is_quantised)[-1]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=_tolerance(model))


def _tolerance(model: CompiledModel) -> float:
    options = model.options
    if options.weights in ("q8_0", "q4") and multiplies_blocks(model.spec, HOST):
        return TOLERANCE_OF_BLOCKS
    least = QUANTISED_CACHE_TOLERANCE if options.kv == "q8_0" else 0
    return max(
        least, *(TOLERANCE.get(kind, 0) for kind in (options.weights, options.activations, options.kv))
    )


def expect_extend(model: CompiledModel, sequence: Tokens, cut: int, tables: Tokens) -> None:
    """One extend decodes the last of `sequence` again and, beside it, computes from `cut` to it anew.

    `tables` [2, width]: the sequence's pages, and others that are to hold what comes from `cut` on.
    """
    tables[1, : cut // model.options.block_seq_stride] = tables[0, : cut // model.options.block_seq_stride]
    last = len(sequence) - 1
    padding = [0, 0]
    packed = np.concatenate([sequence[last:], sequence[cut:last], padding])
    starts, seq_lens = np.array([last, cut]), np.array([last + 1, last])
    result = model.extend("extend", packed, np.array([0, 1]), starts, seq_lens, tables)
    expect(model, result.logits[0], sequence)
    expect(model, result.logits[1], sequence[:last])
