"""Measures, at startup, how many prompt tokens to compute per step while requests decode.

The ratio of prefill to decode cost varies by 10x across CPUs, and the number of tokens that keep a GPU busy
varies as much between GPUs and models. No constant suits every machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.padding_runs import shape_s

logger = logging.getLogger(__name__)

TYPICAL_ROWS = 8
# Maximum time that a prefill delays decodes under a light load, as a number of decode invocations. These are
# measured on padding rows, which have no context to attend to and take half as long as real rows. With a few
# decodes instead, on a CPU with AVX-512, the benchmark workloads W2 and W3 lost 5 to 10 percent of their
# throughput and W2's TTFT rose by a quarter, while the p99 of ITL fell by a fifth.
WORTH_DECODES = 16
# The same if prompts and decodes share an invocation. Small shares of prompts then cost little, because the
# decodes use the weights that are read for them (docs/measurements.md).
MIXED_WORTH_DECODES = 2
# Each invocation reads all weights: smaller ones cost throughput. With 96, streams waited longer for a token
# than with other engines (docs/measurements.md).
LEAST_TOKENS = 48
NUM_RUNS = 3
# Limit on the total time of these measurements, to bound startup time; slower prefills are not measured.
TIME_LIMIT_S = 2.0
# Maximum time that a prefill on a GPU delays the next token of running requests. MLPerf Inference allows
# 100 ms per token for a server of Llama 3.1 8B.
MAX_GAP_S = 0.1
# If a decode takes longer than MAX_GAP_S / DECODES_OF_A_PREFILL, longer prefills are not measured: a GPU that
# takes 20 ms to read the weights takes more than 100 ms to prefill a thousand tokens.
DECODES_OF_A_PREFILL = 5


def tokens_beside_decodes(
    runner: BatchRunner, most_tokens: int, clock: Callable[[], float], *, mixes: bool
) -> int | None:
    """Measure how many prompt tokens to compute per step while requests decode, under a light load.

    Their invocation takes at most as long as WORTH_DECODES decodes of TYPICAL_ROWS. With `mixes`, such a
    decode is part of it, and it takes as long as MIXED_WORTH_DECODES.

    Returns:
        Tokens in full pages: at least LEAST_TOKENS, even if these take longer, and at most `most_tokens`.
        None if the VMFB has no entry that takes any number of them.
    """
    worth_decodes = MIXED_WORTH_DECODES if mixes else WORTH_DECODES
    end = clock() + TIME_LIMIT_S
    decode_s = shape_s(runner, runner.buckets.decode_of(TYPICAL_ROWS), NUM_RUNS)
    found = None
    for pages in _some_pages(-(-LEAST_TOKENS // runner.stride), most_tokens // runner.stride):
        shape = runner.buckets.mixed_of(TYPICAL_ROWS, pages) if mixes else runner.buckets.prefill_of(pages)
        if shape is None:
            break
        is_longer = clock() + worth_decodes * decode_s > end
        is_longer = is_longer or shape_s(runner, shape, NUM_RUNS) > worth_decodes * decode_s
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
    """Measure how many prompt tokens, in full pages, a GPU prefills within MAX_GAP_S.

    Args:
        runner: Its program must be warmed up.
        least_tokens: The default budget; twice this number is measured first, then four times, and so on.
        most_tokens: The largest number to measure.

    Returns:
        The largest measured number within MAX_GAP_S. None if already the first one takes longer, or if the
        VMFB has no prefill entry of dynamic length for one row.
    """
    decode_s = shape_s(runner, runner.buckets.decode_of(TYPICAL_ROWS), NUM_RUNS)
    if DECODES_OF_A_PREFILL * decode_s > MAX_GAP_S:
        return None
    found = None
    for pages in _doubles(least_tokens // runner.stride, most_tokens // runner.stride):
        shape = runner.buckets.prefill_of(pages)
        if shape is None:
            break
        prefill_s = shape_s(runner, shape, NUM_RUNS)
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
    """Yield twice `least`, four times `least` and so on, up to `most`."""
    while (least := 2 * least) <= most:
        yield least


def _some_pages(least: int, most: int) -> list[int]:
    """Return page counts from `least` up to `most`, each a third larger than the one before."""
    pages = [least]
    while pages[-1] + max(1, pages[-1] // 3) <= most:
        pages.append(pages[-1] + max(1, pages[-1] // 3))
    return [each for each in pages if each <= most]
