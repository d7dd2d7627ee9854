"""Limits of the model and the page pool that requests are checked against."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.contract.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Context length in tokens, and the tokens that end a sequence."""

    max_seq_len: int
    eos_token_ids: frozenset[int]

    def check(self, call: GenerateCall, pool_tokens: int) -> None:
        """Raise InvalidRequestError for a request that exceeds the context length or `pool_tokens`."""
        num_prompt, max_tokens = len(call.prompt_token_ids), call.params.max_tokens
        total = num_prompt + max_tokens
        if not num_prompt:
            raise InvalidRequestError("the prompt is empty: at least one token is needed", "prompt")
        if total > self.max_seq_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}: "
                f"together more than the model's context of {self.max_seq_len}",
                "max_tokens",
            )
        if total > pool_tokens:
            raise InvalidRequestError(
                f"{total} tokens of prompt and output do not fit the server's KV cache, which holds "
                f"{pool_tokens}; start it with more --pages",
                "max_tokens",
            )
