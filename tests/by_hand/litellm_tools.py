"""LiteLLM against a server: a JSON schema, a loop of tools, and streamed calls.

pip install litellm mcp
python tests/by_hand/litellm_tools.py http://127.0.0.1:8000/v1 SmolLM2-135M-Instruct
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm  # type: ignore[import-not-found]
from pydantic import BaseModel, Field

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


class City(BaseModel):
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=99_999_999)


def main(base_url: str, model_name: str) -> None:
    asked: dict[str, Any] = {
        "model": f"openai/{model_name}",
        "base_url": base_url,
        "api_key": "-",
        "temperature": 0,
        "max_tokens": 400,
    }
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = litellm.completion(**asked, messages=messages, response_format=City)
    print("schema", City.model_validate_json(answer.choices[0].message.content))
    for choice in ("required", "none"):
        answer = litellm.completion(**asked, messages=messages, tools=TOOLS, tool_choice=choice)
        message = answer.choices[0].message
        print("loop", answer.choices[0].finish_reason, message.tool_calls, (message.content or "")[:100])
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"sunny in {city[:20]}"})
    chunks = list(
        litellm.completion(**asked, messages=messages[:1], tools=TOOLS, tool_choice="required", stream=True)
    )
    joined = litellm.stream_chunk_builder(chunks, messages=messages[:1])
    print("streamed", len(chunks), joined.choices[0].message.tool_calls)


if __name__ == "__main__":
    main(*sys.argv[1:])
