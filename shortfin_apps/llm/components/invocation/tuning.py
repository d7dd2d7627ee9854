"""Measures, at startup, how many prompt tokens to compute per step while requests decode.

The prefill-to-decode cost ratio varies by 10x across CPUs, and the number of tokens that keep a GPU busy
varies as much between GPUs and models. No single number suits every machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner

logger = logging.getLogger(__name__)

TYPICAL_ROWS = 8
# Maximum decode delay under a light load, in decodes. They are measured on padding rows, which attend to
# nothing and take half as long as others. With a few decodes instead, on a CPU with AVX-512, W2 and W3 lost 5
# to 10 percent of their throughput and W2's first tokens came a quarter later, while the p99 of the gaps was
# a fifth lower.
WORTH_DECODES = 16
# Each invocation reads all weights, so much smaller ones cost throughput.
LEAST_TOKENS = 96
NUM_RUNS = 3
# Slower prefills are not measured, to bound startup time.
TIME_LIMIT_S = 2.0
# Maximum delay of running requests' next token by prompts on a GPU. MLPerf Inference allows a server of Llama
# 3.1 8B 100 ms a token.
MAX_GAP_S = 0.1
# If a decode takes longer than MAX_GAP_S over this, longer prefills are not tried: a GPU that takes 20 ms to
# read the weights takes more than 100 ms to multiply a thousand tokens by them.
DECODES_OF_A_PREFILL = 5


def tokens_beside_decodes(runner: BatchRunner, most_tokens: int, clock: Callable[[], float]) -> int | None:
    """Number of prefill tokens, in full pages, that take as long as WORTH_DECODES decodes of TYPICAL_ROWS.

    At least LEAST_TOKENS, even for a model with prefills too slow to measure, and at most `most_tokens`. None
    if the VMFB has no prefill of any length.
    """
    end = clock() + TIME_LIMIT_S
    decode_s = runner.shape_s(runner.buckets.decode_of(TYPICAL_ROWS), NUM_RUNS)
    found = None
    for pages in _some_pages(-(-LEAST_TOKENS // runner.stride), most_tokens // runner.stride):
        shape = runner.buckets.prefill_of(pages)
        if shape is None:
            break
        is_longer = clock() + WORTH_DECODES * decode_s > end
        is_longer = is_longer or runner.shape_s(shape, NUM_RUNS) > WORTH_DECODES * decode_s
        if found is None or not is_longer:
            found = pages * runner.stride
        if is_longer:
            break
    logger.info(
        "a decode of %d rows takes %.1f ms; with decodes, %s tokens of a light load's prompts are computed",
        TYPICAL_ROWS,
        1e3 * decode_s,
        found,
    )
    return found


def tokens_within_gap(runner: BatchRunner, least_tokens: int, most_tokens: int) -> int | None:
    """Number of prompt tokens, in full pages, that a GPU prefills within MAX_GAP_S.

    Args:
        runner: of a warm program.
        least_tokens: the budget without a measurement. Doublings of it are measured.
        most_tokens: the largest invocation that the engine is prepared for.

    Returns:
        None if the first doubling takes longer, or if the VMFB has no prefill of any length.
    """
    decode_s = runner.shape_s(runner.buckets.decode_of(TYPICAL_ROWS), NUM_RUNS)
    if DECODES_OF_A_PREFILL * decode_s > MAX_GAP_S:
        return None
    found = None
    for pages in _doubles(least_tokens // runner.stride, most_tokens // runner.stride):
        shape = runner.buckets.prefill_of(pages)
        if shape is None:
            break
        prefill_s = runner.shape_s(shape, NUM_RUNS)
        if prefill_s > MAX_GAP_S:
            break
        found = pages * runner.stride
        logger.info(
            "a decode of %d rows takes %.1f ms, a prefill of %d tokens %.1f ms, which it adds to the time "
            "between two tokens of running requests",
            TYPICAL_ROWS,
            1e3 * decode_s,
            found,
            1e3 * prefill_s,
        )
    return found


def _doubles(least: int, most: int) -> Iterator[int]:
    """Twice `least`, four times `least` and so on, up to `most`."""
    while (least := 2 * least) <= most:
        yield least


def _some_pages(least: int, most: int) -> list[int]:
    """Page counts from `least` up to `most`, each a third larger than the last."""
    pages = [least]
    while pages[-1] + max(1, pages[-1] // 3) <= most:
        pages.append(pages[-1] + max(1, pages[-1] // 3))
    return [each for each in pages if each <= most]
