"""Checks of a server's answers: receipts under preemption, drills of harmless faults, a soak.

The server has few pages, and runs `random:tiny`, built to answer with the same bits however it is scheduled.
Without a compiler, it runs the subject, of which answers to requests that were preempted may not be compared.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.offline.local_model import AppAnswer, LocalModel
from shortfin_apps.llm.serving.receipts.receipt import Receipt
from shortfin_apps.llm.tools.qualify.bench import FEW_PAGES, Bench, gives_same_bits
from shortfin_apps.llm.tools.qualify.outcome import Failed, Fault, Passed, Skipped
from shortfin_apps.llm.tools.replay.in_process import EXTEND, SCHEDULES, opened, replay

GENERATE, ABORT = "/generate", "/abort"
TOKENS_OF_POOL = (FEW_PAGES - 1) * 16
LONG = 160  # tokens of an answer that a drill ends early
SHORT = 12
CROWD_TOKENS = 40
FREE_WITHIN_S = 30.0
POLL_S = 0.01
OK, TOO_LATE = 200, 408

Drill = Callable[[LocalModel], Awaitable[str]]
"""Disturbs a server, and returns what it did. Raises Failed."""


def receipts(bench: Bench) -> Passed:
    """Make receipts while requests are preempted, and replay them in other schedules."""
    artifact = bench.invariant
    thread, model = _server(bench)
    made, preemptions = thread.run(_receipts(model))
    if not preemptions:
        raise Failed(None, "no request was preempted, although the pages are too few for all")
    bench.stop_server()
    outcomes = []
    with opened(artifact.vmfb.parent, made, bench.kind) as subject:
        for name in ("alone", "preempted", EXTEND):
            outcomes.append(replay(subject, SCHEDULES[name]))
    figures = {
        "preemptions": preemptions,
        "schedules": [outcome.document() for outcome in outcomes],
    }
    for outcome in outcomes if gives_same_bits(artifact) else ():
        if outcome.differences:
            number, text = next(iter(outcome.differences.items()))
            text = f"receipt {number} of {len(made)}, replayed {outcome.schedule}: {text}"
            raise Failed(Fault.WRONG_ANSWER, text, figures)
    counts = ", ".join(f"{each.schedule} {each.num_same}" for each in outcomes if each.skipped is None)
    text = (
        f"of {len(made)} receipts, made with {preemptions} preemptions, replays gave the same bits: {counts}"
    )
    return Passed(text if gives_same_bits(artifact) else f"{text} (not promised on this device)", figures)


async def _receipts(model: LocalModel) -> tuple[list[Receipt], int]:
    before = model.stats().preemptions
    answers = await asyncio.gather(*(_answer(model, **_of_crowd(number)) for number in range(8)))
    found = [Receipt.parse(each["responses"][0]["responses"][0]["meta_info"]["receipt"]) for each in answers]
    return found, model.stats().preemptions - before


def _of_crowd(number: int) -> dict[str, Any]:
    """Return the request `number` of those whose pages do not suffice for all of them."""
    random = Random(number)
    prompt = [random.randrange(32, 127) for _ in range(24 + number)]
    return {
        "input_ids": prompt,
        "sampling_params": {"max_tokens": CROWD_TOKENS, "ignore_eos": True},
        "receipt": True,
    }


def drill(act: Drill) -> Callable[[Bench], Passed]:
    """Return a check that a drill leaves no page leased, and the next answer as it was."""

    def run(bench: Bench) -> Passed:
        thread, model = _server(bench)
        return Passed(thread.run(_drill(model, act)))

    return run


async def _drill(model: LocalModel, act: Drill) -> str:
    before = await _known_answer(model)
    what = await act(model)
    await _all_pages_free(model)
    after = await _known_answer(model)
    if after != before:
        raise Failed(
            Fault.WRONG_ANSWER,
            f"{what}; afterwards a known prompt has another answer",
            {"before": before, "after": after},
        )
    return f"{what}; all pages are free again, and a known prompt has the same answer"


async def abort(model: LocalModel) -> str:
    body = {**_long(), "rid": "qualify", "stream": True}
    async with model.stream(GENERATE, _json(body)) as answer:
        await _first_piece(answer)
        async with model.stream(ABORT, _json({"rid": "qualify"})) as aborted:
            found = json.loads(await aborted.whole())
        await answer.whole()
    if found != {"aborted": 1}:
        raise Failed(None, f"`/abort` answered {found}")
    return "`/abort` ended an answer in its middle"


async def leave(model: LocalModel) -> str:
    async with model.stream(GENERATE, _json({**_long(), "stream": True})) as answer:
        await _first_piece(answer)
    return "a client left after the first token"


async def deadline(model: LocalModel) -> str:
    async with model.stream(GENERATE, _json({**_long(), "timeout_s": 0.005})) as answer:
        body = await answer.whole()
    if answer.status == TOO_LATE:
        return f"a request of {LONG} tokens ended at its deadline of 5 ms, before its first token"
    meta = json.loads(body)["responses"][0]["responses"][0]["meta_info"] if answer.status == OK else {}
    if meta.get("finish_reason", {}).get("type") != "abort":
        raise Failed(None, f"a request of {LONG} tokens in 5 ms got {answer.status}: {_start(body)}")
    return f"a request of {LONG} tokens ended at its deadline of 5 ms"


async def exhaust_pages(model: LocalModel) -> str:
    """Send more requests than there are pages for, after each of them alone."""
    before = model.stats().preemptions
    alone = [(await _answer(model, **_of_crowd(number))) for number in range(8)]
    together = await asyncio.gather(*(_answer(model, **_of_crowd(number)) for number in range(8)))
    preemptions = model.stats().preemptions - before
    differing = [n for n, (a, b) in enumerate(zip(alone, together, strict=True)) if _ids(a) != _ids(b)]
    if differing and model.name == SAME_BITS:
        text = f"{len(differing)} of 8 answers have other tokens than alone, after {preemptions} preemptions"
        raise Failed(Fault.WRONG_ANSWER, text)
    if not preemptions and model.name == SAME_BITS:
        raise Failed(None, "no request was preempted, although the pages are too few for all")
    return f"8 requests on pages for a few were all answered, with {preemptions} preemptions"


SAME_BITS = "same-bits"  # the name of a served model that gives a request the same bits in any schedule


def _server(bench: Bench) -> tuple[Any, LocalModel]:
    try:
        artifact = bench.invariant
    except Skipped:
        artifact = bench.artifact
        bench.forget_model()
    return bench.server(
        artifact,
        pages=_num_pages(artifact),
        prefix_cache="none",
        served_model_name=SAME_BITS if gives_same_bits(artifact) else artifact.name,
        batch_mode="default",
    )


def _num_pages(artifact: Artifact) -> int:
    return 1 + -(-TOKENS_OF_POOL // artifact.config.stride)


def _long() -> dict[str, Any]:
    return {"input_ids": [65, 66, 67], "sampling_params": {"max_tokens": LONG, "ignore_eos": True}}


async def _known_answer(model: LocalModel) -> list[int]:
    prompt = [ord(letter) for letter in "Once upon a time"]
    return _ids(
        await _answer(
            model, input_ids=prompt, sampling_params={"max_tokens": SHORT, "ignore_eos": True}, receipt=True
        )
    )


async def _answer(model: LocalModel, **body: Any) -> dict[str, Any]:
    async with model.stream(GENERATE, _json(body)) as answer:
        content = await answer.whole()
    if answer.status != OK:
        raise Failed(Fault.WRONG_ANSWER, f"a request got {answer.status}: {_start(content)}")
    return dict(json.loads(content))


def _ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["responses"][0]["responses"][0]["meta_info"]["receipt"]["output_ids"])


async def _first_piece(answer: AppAnswer) -> None:
    async for _ in answer.pieces():
        return


async def _all_pages_free(model: LocalModel) -> None:
    begin = time.monotonic()
    while (leased := model.stats().pages.leased) and time.monotonic() - begin < FREE_WITHIN_S:
        await asyncio.sleep(POLL_S)
    if leased:
        raise Failed(
            Fault.LOST_PAGES, f"{leased} pages are still leased after {FREE_WITHIN_S:.0f} s without requests"
        )


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _start(body: bytes) -> str:
    return body[:200].decode(errors="replace")


MAX_GROWTH = 0.05  # of the process's memory, after a tenth of the time
CLIENTS = 8
MAX_SAMPLES = 100  # of memory, in the report


def soak(bench: Bench) -> Passed:
    """Keep the server busy with answers, early leaves and deadlines; watch memory, pages and answers."""
    thread, model = _server(bench)
    duration_s = 60 * bench.plan.soak_minutes
    counts, memory = thread.run(_soak(model, duration_s))
    growth = max(memory) / memory[len(memory) // 10] - 1
    sample = memory[:: -(-len(memory) // MAX_SAMPLES)]
    figures = {"requests": dict(counts), "peak_memory_kib": sample, "growth": growth}
    if growth > MAX_GROWTH:
        raise Failed(None, f"memory grew by {growth:.0%} in {duration_s / 60:.0f} minutes", figures)
    return Passed(f"{counts.total()} requests, memory grew by {growth:.1%}, all pages are free", figures)


async def _soak(model: LocalModel, duration_s: float) -> tuple[Counter[str], list[int]]:
    """Return the requests by kind, and samples of the process's peak memory in KiB."""
    counts: Counter[str] = Counter()
    memory: list[int] = []
    end = time.monotonic() + duration_s
    before = await _known_answer(model)

    async def client(number: int) -> None:
        random = Random(number)
        while time.monotonic() < end:
            kind = random.choice(("answer", "answer", "leave", "deadline"))
            counts[kind] += 1
            if kind == "answer":
                await _answer(model, **_of_crowd(random.randrange(8)))
            else:
                await {"leave": leave, "deadline": deadline}[kind](model)
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    await _all_pages_free(model)
    if await _known_answer(model) != before:
        raise Failed(Fault.WRONG_ANSWER, "afterwards a known prompt has another answer", dict(counts))
    return counts, memory
