"""LangChain against a server: `with_structured_output` in two methods, streamed calls, and a tool agent.

pip install langchain langchain-openai
python tests/by_hand/langchain_tools.py http://127.0.0.1:8000/v1 SmolLM2-135M-Instruct
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from langchain.agents import create_agent  # type: ignore[import-not-found]
from langchain.agents.middleware import AgentMiddleware  # type: ignore[import-not-found]
from langchain_core.tools import tool  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
from pydantic import BaseModel, Field

QUESTION = "What is the weather in Paris?"


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=99_999_999)


def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"It is sunny in {city[:20]}."


class FirstCall(AgentMiddleware):  # type: ignore[misc]
    """Makes a small model call a tool at first, and answer with its result then."""

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        has_result = any(message.type == "tool" for message in request.messages)
        return handler(request.override(tool_choice="none" if has_result else "required"))


def main(base_url: str, model_name: str) -> None:
    model = ChatOpenAI(base_url=base_url, api_key="-", model=model_name, temperature=0, max_tokens=400)
    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(City, method=method)
        print(method, structured.invoke("Describe Paris as a city, in JSON."))
    weather = tool(get_weather)
    bound = model.bind_tools([weather], tool_choice="get_weather")
    chunks = list(bound.stream(QUESTION))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    print("streamed", len(chunks), joined.tool_calls)
    agent = create_agent(model, [weather], middleware=[FirstCall()])
    for message in agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"]:
        print("agent", message.type, message.content[:100], getattr(message, "tool_calls", ""))


if __name__ == "__main__":
    main(*sys.argv[1:])
