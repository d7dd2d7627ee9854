"""Builds the bodies of requests from the arguments of LLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from shortfin_apps.llm.client.answers import ChatOptions, Sampling
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.lone_surrogates import json_of

OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def is_one_prompt(prompts: object) -> bool:
    """Whether `prompts` is one text or one list of token ids, rather than a list of prompts."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts must be a text, token ids or a list of them, not {type(prompts).__name__}", "prompts"
        )
    return len(prompts) > 0 and not isinstance(prompts[0], str | Sequence)


def check_names(given: Mapping[str, Any], kind: type[Sampling] | type[ChatOptions]) -> None:
    """Raise InvalidRequestError for an unknown parameter."""
    known = kind.__annotations__.keys() - {"return_token_ids"}
    for name in given:
        if name not in known:
            raise InvalidRequestError(
                f"there is no parameter `{name}`; there are {', '.join(sorted(known))}", name
            )


def completion_body(prompt: str | Sequence[int], logprobs: int | None, sampling: Mapping[str, Any]) -> bytes:
    """Return a body for `/v1/completions`. Raises InvalidRequestError for values that JSON lacks."""
    return _body(
        {"prompt": prompt if isinstance(prompt, str) else list(prompt), "logprobs": logprobs}, sampling
    )


def chat_body(
    messages: Sequence[Mapping[str, Any]], logprobs: int | None, options: Mapping[str, Any]
) -> bytes:
    """Return a body for `/v1/chat/completions`. Raises InvalidRequestError for values that JSON lacks."""
    alternatives = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    return _body({"messages": list(messages), **alternatives}, options)


def streamed(body: bytes) -> bytes:
    """Return the same request with a streamed answer."""
    return orjson.dumps(orjson.loads(body) | {"stream": True, "stream_options": {"include_usage": True}})


def _body(fields: Mapping[str, Any], given: Mapping[str, Any]) -> bytes:
    values = {name: value for name, value in {**fields, **given}.items() if value is not None}
    try:
        return json_of(values | {"return_token_ids": True}, option=OPTIONS)
    except TypeError as error:
        raise InvalidRequestError(f"the request has what JSON cannot express: {error}") from None
