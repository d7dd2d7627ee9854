"""The JSON objects in OpenAI's answers: choices, whole and in chunks, log-probabilities, and usage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from shortfin_apps.llm.components.frontend.text_stream import TextDelta, TextRequest
from shortfin_apps.llm.components.request.messages import TokenLogprobs
from shortfin_apps.llm.components.text.tokenizer import REPLACEMENT, Tokenizer


class Shape(Protocol):
    """Format of the answers of one of the two routes."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def choice(self, index: int, answer: TextDelta) -> dict[str, Any]:
        """One element of `choices`, for a complete answer."""
        ...

    def chunks(self, index: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """The streamed elements of `choices` for a delta; none when it has nothing to send yet."""
        ...


class CompletionShape:
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, requests: Sequence[TextRequest], echoes: Sequence[str] | None = None
    ) -> None:
        """`echoes` are the prompts to send before each choice's own text."""
        self._tokenizer = tokenizer
        self._echoes = list(echoes or [""] * len(requests))  # "" once it is sent
        # For the offset of each token in its choice's text. The lengths of token texts do not add up to it:
        # a character may take several tokens, and special tokens have no text.
        self._detokenizers = [r.detokenizer(tokenizer) for r in requests]
        self._offsets = [0] * len(requests)

    def choice(self, index: int, answer: TextDelta) -> dict[str, Any]:
        echo, self._echoes[index] = self._echoes[index], ""
        return {
            "index": index,
            "text": echo + answer.text,
            "logprobs": self._logprobs(index, answer),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }

    def chunks(self, index: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        if delta.text or delta.logprobs or delta.finish_reason is not None:
            yield self.choice(index, delta)

    def _logprobs(self, index: int, delta: TextDelta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        tokens = [self._tokenizer.token_text(i) for i in delta.token_ids]
        offsets = []
        for token_id in delta.token_ids:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(self._detokenizers[index].push(token_id))
        return {
            "tokens": tokens,
            "token_logprobs": [lp.logprob for lp in delta.logprobs],
            "top_logprobs": [self._top(t, lp) for t, lp in zip(tokens, delta.logprobs, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, token: str, logprobs: TokenLogprobs) -> dict[str, float]:
        top = {self._tokenizer.token_text(i): logprob for i, logprob in reversed(logprobs.top)}
        return {**top, token: logprobs.logprob}


class ChatShape:
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._started: set[int] = set()

    def choice(self, index: int, answer: TextDelta) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"index": index, "message": message, **self._rest(answer)}

    def chunks(self, index: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        if index not in self._started:
            self._started.add(index)
            role = {"role": "assistant", "content": ""}
            yield {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
        if delta.text or delta.logprobs or delta.finish_reason is not None:
            content = {"content": delta.text} if delta.text else {}
            yield {"index": index, "delta": content, **self._rest(delta)}

    def _rest(self, delta: TextDelta) -> dict[str, Any]:
        return {
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        content = [
            {
                **self._token(token_id, logprobs.logprob),
                "top_logprobs": [self._token(i, logprob) for i, logprob in logprobs.top],
            }
            for token_id, logprobs in pairs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.token_text(token_id)
        # The text of a partial character is U+FFFD, so its bytes are unknown here.
        data = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": data}


def usage(requests: Sequence[TextRequest], generated: Sequence[int], cached: Sequence[int]) -> dict[str, Any]:
    """Token counts; `generated` and `cached` are per request. A prompt with `n` choices counts once."""
    firsts = [index for index, request in enumerate(requests) if request.choice == 0]
    prompt_tokens = sum(len(requests[index].prompt_token_ids) for index in firsts)
    completion_tokens = sum(generated)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached[index] for index in firsts)},
    }
