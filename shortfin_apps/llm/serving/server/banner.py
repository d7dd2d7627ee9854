"""The message of a server that is ready: its address, and a request to try."""

from __future__ import annotations

import contextlib
import logging

from shortfin_apps.llm.console import visible

logger = logging.getLogger(__name__)


def announce(name: str, url: str, *, has_chat: bool, logs_json: bool) -> None:
    """Print the message, or log it if the log is JSON, as stdout may be collected with the log."""
    if logs_json:
        logger.info("serving %s at %s", name, url)
    else:
        with contextlib.suppress(OSError, ValueError):  # standard output is closed or has no reader
            print(visible(_banner(name, url, has_chat)), flush=True)


def _banner(name: str, url: str, has_chat: bool) -> str:
    """Return the message with a chat if the model has a chat template, else with a completion."""
    route, body = "completions", '{"prompt": "The capital of France is", "temperature": 0}'
    if has_chat:
        question = '{"role": "user", "content": "What is the capital of France?"}'
        route, body = "chat/completions", '{"messages": [' + question + '], "temperature": 0}'
    return (
        f"Serving {name} at {url} (Ctrl-C stops it). Try:\n"
        f"  curl {url}/v1/{route} -H 'Content-Type: application/json' \\\n    -d '{body}'"
    )
