"""How many tokens of a prefill take as long as a few decodes, measured when the server starts.

A machine whose matmuls are quick beside its memory (AMX) prefills hundreds of tokens meanwhile, one with
AVX2 a page or two. So how much of a prompt decodes are to wait for is no number that suits every machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner

logger = logging.getLogger(__name__)

TYPICAL_ROWS = 8
# What decodes wait for at most beside a light load. These are of padding rows, which attend to nothing and
# take half as long as others. With a few of them, on a CPU with AVX-512, W2 and W3 lost 5 to 10 percent of
# their throughput and W2's first tokens came a quarter later, for a p99 of the gaps that was a fifth lower.
WORTH_DECODES = 16
# Each invocation reads all weights, so that much smaller ones cost throughput.
LEAST_TOKENS = 96
NUM_RUNS = 3
# Prefills that take longer are not measured: the server should start.
TIME_LIMIT_S = 2.0


def tokens_beside_decodes(runner: BatchRunner, most_tokens: int, clock: Callable[[], float]) -> int | None:
    """Tokens of a prefill, in whole pages, that take as long as WORTH_DECODES decodes of TYPICAL_ROWS.

    At least LEAST_TOKENS, also of a model so slow that prefills take too long to be measured, and at most
    `most_tokens`. None if the VMFB has no prefill of any length.
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
        "a decode of %d rows takes %.1f ms; beside decodes, %s tokens of a light load's prompts are computed",
        TYPICAL_ROWS,
        1e3 * decode_s,
        found,
    )
    return found


def _some_pages(least: int, most: int) -> list[int]:
    """`least`, and a third more again and again up to `most`."""
    pages = [least]
    while pages[-1] + max(1, pages[-1] // 3) <= most:
        pages.append(pages[-1] + max(1, pages[-1] // 3))
    return [each for each in pages if each <= most]
