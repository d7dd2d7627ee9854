"""Converts the requests of `LLM` to the JSON bodies of the HTTP routes, and JSON answers to `Answer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from shortfin_apps.llm.client.answers import ChatOptions, Sampling, ToolCall, Usage, parse_generation
from shortfin_apps.llm.client.errors import ServerError
from shortfin_apps.llm.client.sending import checked_fields, checked_prompt
from shortfin_apps.llm.contract.errors import InvalidRequestError, LlmError
from shortfin_apps.llm.lone_surrogates import json_of

OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def is_one_prompt(prompts: object) -> bool:
    """Whether `prompts` is one prompt (a text or a list of token ids) rather than a list of prompts.

    Raises InvalidRequestError if it is neither.
    """
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts must be a text, token ids or a list of them, not {type(prompts).__name__}", "prompts"
        )
    return len(prompts) > 0 and not isinstance(prompts[0], str | Sequence)


def check_names(given: Mapping[str, Any], kind: type[Sampling] | type[ChatOptions]) -> None:
    """Raise InvalidRequestError for a parameter in `given` that `kind` does not have."""
    known = kind.__annotations__.keys() - {"return_token_ids"}
    for name in given:
        if name not in known:
            raise InvalidRequestError(
                f"there is no parameter `{name}`; there are {', '.join(sorted(known))}", name
            )


def completion_body(prompt: str | Sequence[int], logprobs: int | None, sampling: Mapping[str, Any]) -> bytes:
    """Return a request body for `/v1/completions`.

    Raises InvalidRequestError for values that JSON cannot express.
    """
    return _body({"prompt": checked_prompt(prompt), "logprobs": logprobs}, sampling)


def chat_body(
    messages: Sequence[Mapping[str, Any]], logprobs: int | None, options: Mapping[str, Any]
) -> bytes:
    """Return a request body for `/v1/chat/completions`.

    Raises InvalidRequestError for values that JSON cannot express.
    """
    alternatives = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    return _body({"messages": list(messages), **alternatives}, options)


def streamed(body: bytes) -> bytes:
    """Return the request body changed so that the answer is streamed."""
    return orjson.dumps(orjson.loads(body) | {"stream": True, "stream_options": {"include_usage": True}})


def _body(fields: Mapping[str, Any], given: Mapping[str, Any]) -> bytes:
    values = checked_fields({**fields, **given})
    try:
        return json_of(values | {"return_token_ids": True}, option=OPTIONS)
    except TypeError as error:
        raise InvalidRequestError(f"the request has what JSON cannot express: {error}") from None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural log-probability of a token, and of the most likely tokens at its position (`top`)."""

    token: str
    logprob: float
    top: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one prompt or conversation.

    `finish_reason` is OpenAI's: "stop", "length" or "tool_calls". `logprobs` has one element per token; None
    unless requested. `reasoning` is the model's reasoning text, which `text` does not contain. If `error` is
    set, the other fields are empty.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    error: LlmError | None = None


def failed(error: LlmError) -> Answer:
    return Answer(text="", token_ids=(), finish_reason=None, usage=Usage(0, 0), error=error)


def parse_answer(body: bytes) -> Answer:
    """Parse the body of a completion or a chat completion. Raises ServerError for anything else."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ServerError("the answer is not JSON") from error
    generation = parse_generation(parsed)
    return Answer(
        text=generation.text,
        token_ids=generation.token_ids or (),
        finish_reason=generation.finish_reason,
        usage=generation.usage or Usage(0, 0),
        logprobs=_logprobs(parsed["choices"][0].get("logprobs")),
        reasoning=generation.reasoning,
        tool_calls=generation.tool_calls,
    )


def _logprobs(found: dict[str, Any] | None) -> tuple[TokenLogprob, ...] | None:
    if found is None:
        return None
    return tuple(_of_chat(found["content"]) if "content" in found else _of_completion(found))


def _of_completion(found: dict[str, Any]) -> list[TokenLogprob]:
    names = ("tokens", "token_logprobs", "top_logprobs")
    return [TokenLogprob(*each) for each in zip(*(found[name] for name in names), strict=True)]


def _of_chat(content: Sequence[dict[str, Any]]) -> list[TokenLogprob]:
    return [
        TokenLogprob(
            each["token"], each["logprob"], {top["token"]: top["logprob"] for top in each["top_logprobs"]}
        )
        for each in content
    ]
