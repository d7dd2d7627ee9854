from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.serving.receipts.receipt import Receipt
from tests.integration.served_tiny import serving

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "ignore_eos": True},  # or a forged end might change nothing
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 5},
    {"temperature": 1.2, "min_p": 0.02, "typical_p": 0.9},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {"65": 2.0}, "bad_words": ["ab"]},
    {"regex": "[a-z]+ [0-9]+", "temperature": 1.0},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"ebnf": 'root ::= "a" root | "b"'},
    {"stop": ["e", "a"], "temperature": 1.0},
    {"stop_token_ids": list(range(60, 70)), "min_tokens": 3, "allowed_token_ids": list(range(50, 90))},
    {"ignore_eos": True, "max_tokens": 1},
)


@pytest.fixture(scope="session")
def receipts(tiny_artifact: Artifact) -> list[Receipt]:
    """One of each of KINDS, made beside each other."""

    async def made() -> list[Receipt]:
        async with serving(tiny_artifact) as (client, _):

            async def one(number: int, kind: dict[str, Any]) -> Receipt:
                body = {
                    "text": "Once upon a time " * (1 + number % 3),
                    "sampling_params": {"max_tokens": 20, **kind},
                    "receipt": True,
                }
                response = await client.post("/generate", json=body)
                assert response.status_code == 200, response.text
                [answer] = response.json()["responses"][0]["responses"]
                return Receipt.parse(answer["meta_info"]["receipt"])

            return list(await asyncio.gather(*(one(n, kind) for n, kind in enumerate(KINDS))))

    return asyncio.run(made())
