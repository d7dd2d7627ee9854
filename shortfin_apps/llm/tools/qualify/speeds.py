"""Checks of speed: probes of bandwidth and matmuls, entries against them, workloads, room in memory."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

import httpx

from shortfin_apps.llm.offline.local_model import AppAnswer, LocalModel
from shortfin_apps.llm.tools.bench.load import run_workload
from shortfin_apps.llm.tools.bench.roofline.cases import Choice
from shortfin_apps.llm.tools.bench.stats import Summary
from shortfin_apps.llm.tools.bench.target import Target, server_tokenizer, token_prompts
from shortfin_apps.llm.tools.bench.workload import PRESETS
from shortfin_apps.llm.tools.qualify.bench import Bench, require_compiler
from shortfin_apps.llm.tools.qualify.facts import clocks
from shortfin_apps.llm.tools.qualify.outcome import Failed, Fault, Passed, Skipped

# Of the chip's peak in the table, which is of the fastest product. A probe reaches more than half of its
# product's; a GPU that is stuck at its lowest memory or engine clock reaches less than this.
SLOW_SHARE = 0.25
PROBES = 3
MAX_STREAM_BYTES = 1 << 30  # does not fit into any cache
CPU_STREAM_BYTES = 256 << 20


def bandwidth(bench: Bench) -> Passed:
    """Read a large buffer, and compare with the chip's bandwidth."""
    _need_a_clock(bench)
    num_bytes = CPU_STREAM_BYTES
    if bench.is_on_gpu:
        spare = bench.device.spare_bytes() or 4 * MAX_STREAM_BYTES
        num_bytes = min(MAX_STREAM_BYTES, spare // 4)
    found = [bench.machine.bytes_per_s(num_bytes) for _ in range(PROBES)]
    row = None if bench.chip is None else bench.chip.limits.bytes_per_s
    return judge_speed(bench, "bandwidth", "GB/s", found, row)


def matmul(bench: Bench) -> Passed:
    """Multiply matrices in the model's types, and compare with the chip's peak in bf16."""
    _need_a_clock(bench)
    found = [bench.machine.flops_per_s() for _ in range(PROBES)]
    # A matmul of 1,024 rows cannot fill a large GPU, so a low share is no fault.
    return judge_speed(bench, "matmul", "GFLOP/s", found, None)


def judge_speed(bench: Bench, what: str, unit: str, found: list[float], row: float | None) -> Passed:
    """Return the result of probes. Raises Failed if the best is far below the chip's row."""
    best = max(found)
    figures: dict[str, Any] = {"per_s": found, "row_per_s": row, "clocks_after": clocks()}
    text = f"{what} {best / 1e9:,.0f} {unit}"
    if row is None:
        if bench.chip is not None:
            figures["peak_flops_per_s"] = bench.chip.limits.flops_per_s
        return Passed(text, figures)
    share = best / row
    figures["share_of_row"] = share
    assert bench.chip is not None, "it has the row"
    text += f", {share:.0%} of {bench.chip.limits.product}'s {row / 1e9:,.0f}"
    if share < SLOW_SHARE:
        text += f"; less than {SLOW_SHARE:.0%} means a clock that stays low, or memory of the host"
        raise Failed(Fault.SLOW_CLOCK, text, figures)
    return Passed(text, figures)


def roofline(bench: Bench) -> Passed:
    """Time every entry, and compare with the probes measured right after it."""
    _need_a_clock(bench)
    require_compiler()
    from shortfin_apps.llm.tools.bench.roofline.run import roofline as run_roofline  # imports the compiler

    bench.forget_model()
    context = min(256, bench.artifact.config.max_seq_len)
    choice = Choice([], [context], [context])
    doc = run_roofline(bench.artifact.vmfb.parent, choice, 1, None, with_profile=False)
    ratios = {entry["entry"]: entry["ratio"] for entry in doc["entries"]}
    worst = max(ratios, key=ratios.__getitem__)
    text = f"{len(ratios)} entries take {min(ratios.values()):.1f} to {ratios[worst]:.1f} times their floor"
    return Passed(f"{text} ({worst} most)", {"entries": doc["entries"]})


def workload(name: str) -> Callable[[Bench], Passed]:
    """Return a check that measures one of the benchmark's presets."""

    def run(bench: Bench) -> Passed:
        _need_a_clock(bench)
        preset = PRESETS[name]
        longest = max(preset.prompt_tokens) + preset.output_tokens
        if longest > bench.artifact.config.max_seq_len:
            raise Skipped(f"needs a context of {longest} tokens")
        bench.forget_model()
        thread, model = bench.server(bench.artifact)
        try:
            summary = thread.run(_measured(model, name, bench.left_s))
        except TimeoutError:
            raise Skipped(f"not done within {bench.left_s:.0f} s: the model is too large for it") from None
        return _report(summary)

    return run


async def _measured(model: LocalModel, name: str, limit_s: float) -> Summary:
    async with (
        asyncio.timeout(limit_s),
        httpx.AsyncClient(
            transport=InProcess(model), base_url="http://in-process", timeout=limit_s
        ) as client,
    ):
        prompts = token_prompts(server_tokenizer(client, None))
        target = Target("in-process", "http://in-process", None, client, prompts)
        async for _, summary in run_workload(target, PRESETS[name], secrets.token_hex(4)):
            return summary
    raise AssertionError("a preset of one pass has a summary")


def _report(summary: Summary) -> Passed:
    figures = {
        name: value for name, value in asdict(summary).items() if not name.endswith(("_histogram", "_share"))
    }
    if summary.errors or summary.short_answers:
        reason = next(iter(summary.error_messages), "answers have too few tokens")
        text = f"{summary.errors + summary.short_answers} of {summary.requests} requests failed: {reason}"
        raise Failed(Fault.WRONG_ANSWER, text, figures)
    text = f"{summary.output_tokens_per_s:,.0f} tokens/s, {summary.requests_per_s:.2f} requests/s"
    if summary.ttft_ms_p50 is not None and summary.tpot_ms_p50 is not None:
        text += f", first token after {summary.ttft_ms_p50:.0f} ms, {summary.tpot_ms_p50:.2f} ms a token"
    return Passed(text, figures)


class InProcess(httpx.AsyncBaseTransport):
    """An httpx transport to a LocalModel, which streams its answers (httpx's own ASGI transport does not)."""

    def __init__(self, model: LocalModel) -> None:
        self._model = model

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        context = self._model.stream(request.url.path, body)
        answer = await context.__aenter__()

        async def leave() -> None:
            await context.__aexit__(None, None, None)

        return httpx.Response(answer.status, headers=answer.headers, stream=_Pieces(answer, leave))


class _Pieces(httpx.AsyncByteStream):
    def __init__(self, answer: AppAnswer, leave: Callable[[], Any]) -> None:
        self._answer = answer
        self._leave = leave

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._answer.pieces():
            yield piece

    async def aclose(self) -> None:
        await self._leave()


def headroom(bench: Bench) -> Passed:
    """Report the memory that is free once the model is loaded, in tokens of the KV cache."""
    config = bench.artifact.config
    assert bench.model is not None  # loaded
    spare = bench.device.spare_bytes()
    if spare is None:
        raise Skipped(f"{bench.device.name} does not report its memory")
    dtype = config.paged_kv_cache.dtype
    page_bytes = sum(config.page_elements) * dtype.itemsize
    tokens = spare // page_bytes * config.stride
    figures = {
        "spare_bytes": spare,
        "page_bytes": page_bytes,
        "kv_tokens": tokens,
        "parameter_bytes": sum(path.stat().st_size for path in bench.artifact.parameters),
    }
    if spare == 0:
        raise Failed(None, "no memory is left for the KV cache", figures)
    return Passed(f"{spare / 2**30:.1f} GiB to spare with the model loaded: {tokens:,} tokens", figures)


def _need_a_clock(bench: Bench) -> None:
    assert bench.device is not None  # opened, which loads the driver's library
    if bench.is_emulated:
        raise Skipped("an emulated GPU has no clock; `bench roofline --emulated` counts instead")
