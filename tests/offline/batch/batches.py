"""Inputs of batches for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shortfin_apps.llm.offline.batch.output import Result, result_of
from shortfin_apps.llm.offline.batch.requests import BatchInput, server_url
from shortfin_apps.llm.offline.local_model import Answered


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    body = {"prompt": custom_id, "max_tokens": 2, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def write(path: Path, lines: Iterable[str]) -> Path:
    path.write_text("".join(f"{each}\n" for each in lines))
    return path


def opened(path: Path, custom_ids: Iterable[str]) -> BatchInput:
    return BatchInput.open(write(path, map(line, custom_ids)), server_url)


def completion(text: str = "x") -> bytes:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    return json.dumps({"choices": [{"text": text}], "usage": usage}).encode()


def answered(status: int = 200, body: bytes | None = None) -> Answered:
    return Answered(status, completion() if body is None else body, "request")


def result(custom_id: str, status: int = 200) -> Result:
    return result_of(custom_id, answered(status))


def results_in(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(each) for each in text.split("\n")[:-1]]


def ids_in(path: Path) -> list[str]:
    return [each["custom_id"] for each in results_in(path)]
