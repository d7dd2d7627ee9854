"""Frames a second of the page at `/` with many running requests, in headless Chromium; the feed is scripted.

    python bench/page_frames.py [--requests 256] [--seconds 10]

Prints how often a second the browser's `requestAnimationFrame` was called while the page got such a feed,
four times a second as from a server, and how much CPU time its main thread took for a snapshot: parsing it,
changing the tables, and drawing all plots. A frame has 16.7 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import threading
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from playwright.sync_api import CDPSession, sync_playwright
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from shortfin_apps.llm.serving.api.page.assets import ASSETS, INDEX, PREFIX

PORT = 8399
INTERVAL_S = 0.25
PAGES = 24  # per request

COUNT = """seconds => new Promise(resolve => {
  let frames = 0, longest = 0, last = performance.now();
  const begin = last;
  const tick = now => {
    frames += 1;
    longest = Math.max(longest, now - last);
    last = now;
    if (now - begin < 1000 * seconds) requestAnimationFrame(tick);
    else resolve([frames / ((now - begin) / 1000), longest]);
  };
  requestAnimationFrame(tick);
})"""


def snapshot(number: int, count: int) -> dict[str, Any]:
    at = number * INTERVAL_S
    requests = [
        {
            "id": f"{index:032x}.{index + number // 40}", "rid": f"{index:032x}", "tenant": f"t{index % 9}",
            "state": "running", "prompt": 256, "cached": 64, "computed": 300, "max": 1000, "pages": PAGES,
            "output": (number + index) % 1000, "age": at,
        }
        for index in range(count)
    ]  # fmt: skip
    owners = random.Random(number).sample(range(count), count)
    runs = [number for owner in owners for number in (4 + owner, PAGES)] + [2, 64, 1, 500, 0, 500]
    total = count * PAGES + 1064
    counters = dict.fromkeys(
        ("prompt_tokens", "cached_tokens", "generation_tokens", "steps", "device_s"), number * count
    )
    return {
        "at": at, "running": count, "waiting": 0, "requests": requests, "tenants": [], "window_map": None,
        "pages": {"total": total, "free": 500, "cached": 500, "leased": total - 1000}, "window_pages": None,
        "counters": counters, "map": {"step": 1, "runs": runs},
        "steps": [[number, at, 0.04, f"decode_bs{count}", "decode", 0, count, 0]],
    }  # fmt: skip


async def events(count: int) -> AsyncIterator[str]:
    about = {
        "version": "0", "model": "scripted", "has_chat": True, "max_tokens": 8192, "max_requests": 512,
        "page_tokens": 16, "is_admin": True, "sees_all": True,
    }  # fmt: skip
    yield f"event: about\ndata: {json.dumps(about)}\n\n"
    prepared = [snapshot(number, count) for number in range(200)]
    for number in range(1_000_000):
        each = prepared[number % len(prepared)] | {"at": number * INTERVAL_S}
        each["counters"] = dict.fromkeys(each["counters"], number * count)
        yield f"data: {json.dumps(each)}\n\n"
        await asyncio.sleep(INTERVAL_S)


def serve(count: int) -> uvicorn.Server:
    async def feed(_: Request) -> Response:
        return StreamingResponse(events(count), media_type="text/event-stream")

    async def metrics(_: Request) -> Response:
        return PlainTextResponse("")

    routes = [Route("/", ASSETS[INDEX].answer), Route(f"{PREFIX}/events", feed), Route("/metrics", metrics)]
    routes += [Route(f"{PREFIX}/{name}", asset.answer) for name, asset in ASSETS.items()]
    config = uvicorn.Config(Starlette(routes=routes), port=PORT, log_level="warning")
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    return server


def cpu_s(client: CDPSession) -> float:
    """Return the CPU time of the page's main thread so far."""
    values = {metric["name"]: metric["value"] for metric in client.send("Performance.getMetrics")["metrics"]}
    return float(values["TaskDuration"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    server = serve(options.requests)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for name, width, height in (("wide", 1440, 1000), ("phone", 390, 844)):
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(f"http://127.0.0.1:{PORT}/")
            page.wait_for_function(
                "n => document.querySelectorAll('#requests tr').length === n", arg=options.requests
            )
            client = page.context.new_cdp_session(page)
            client.send("Performance.enable", {"timeDomain": "threadTicks"})
            before_s = cpu_s(client)
            rate, longest_ms = page.evaluate(COUNT, options.seconds)
            each_ms = 1000 * (cpu_s(client) - before_s) / (options.seconds / INTERVAL_S)
            print(
                f"{name}: {options.requests} requests, {rate:.1f} frames/s, the longest {longest_ms:.0f} ms; "
                f"{each_ms:.1f} ms of CPU time a snapshot"
            )
            page.close()
        browser.close()
    server.should_exit = True


if __name__ == "__main__":
    main()
