"""OpenAI's and Anthropic's own clients of an application, in this process."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2
import openai
from fastapi import FastAPI

from tests.serving.api.harness import BASE_URL


def openai_client(app: FastAPI, key: str = "-") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=key, base_url=f"{BASE_URL}/v1", http_client=_http(app), max_retries=0)


def anthropic_client(app: FastAPI, key: str = "-") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(api_key=key, base_url=BASE_URL, http_client=_http(app), max_retries=0)


def _http(app: FastAPI) -> Any:
    transport: Any = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url=BASE_URL)
