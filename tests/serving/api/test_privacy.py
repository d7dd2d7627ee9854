"""Prompts and answers are never logged, whatever happens to the request."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from shortfin_apps.llm.components.request.messages import Delta, GenerateCall
from shortfin_apps.llm.contract.errors import InvocationError
from shortfin_apps.llm.serving.server.logs import formatter
from tests.serving.api.harness import TOKENIZER, Harness
from tests.serving.api.loopback import loopback
from tests.serving.api.scripted_engine import Script, failing, saying

SECRET = "my-secret-words"
CHAT = {"messages": [{"role": "user", "content": SECRET}]}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": SECRET}),
    ("/generate", {"text": SECRET, "stream": True}),
    ("/generate", {"text": [SECRET, ""]}),
    ("/generate", {"text": SECRET, "sampling_params": {"temperature": SECRET}}),
    ("/generate", {"text": SECRET * 1000}),
    ("/v1/completions", {"prompt": SECRET}),
    ("/v1/completions", {"prompt": SECRET, "stream": True, "echo": True}),
    ("/v1/completions", {"prompt": [SECRET, 1]}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {"messages": [{"role": SECRET}]}),
    ("/v1/chat/completions", {**CHAT, "model": SECRET}),
    ("/tokenize", {"prompt": SECRET}),
    ("/tokenize", CHAT),
]


def broken(call: GenerateCall) -> Iterator[Delta]:
    raise ZeroDivisionError


SCRIPTS: dict[str, Script] = {
    "well": saying(TOKENIZER, SECRET),
    "failing": failing(InvocationError("the device failed")),
    "broken": broken,
}


def logged_text(caplog: pytest.LogCaptureFixture) -> str:
    """All that is logged at `info`, with tracebacks and extra fields."""
    records = [record for record in caplog.records if record.levelno >= logging.INFO]
    text, as_json = formatter("text"), formatter("json")
    return "\n".join([*map(text.format, records), *map(as_json.format, records)])


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
async def test_routes_do_not_log_prompts(script: Script, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    harness = Harness(script)
    for path, body in REQUESTS:
        await harness.post(path, body)
    await harness.client.post("/generate", content=f'{{"text": "{SECRET}'.encode())
    assert SECRET not in logged_text(caplog)


async def test_the_server_does_not_log_prompts_or_keys(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with loopback(saying(TOKENIZER, SECRET), api_key="my-secret-key") as server:
        for key in ("my-secret-key", "my-secret-guess"):
            for path, body in REQUESTS:
                await server.client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
    assert "my-secret" not in logged_text(caplog)
