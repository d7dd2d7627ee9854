"""The JSON objects in OpenAI's answers: choices, complete and in chunks, log-probabilities, and usage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shortfin_apps.llm.components.request.messages import TokenLogprobs
from shortfin_apps.llm.serving.api.answer_reader import MessageReader
from shortfin_apps.llm.serving.api.receipts import receipt_field
from shortfin_apps.llm.serving.api.tools import PLAIN, AnswerForm
from shortfin_apps.llm.serving.frontend.prompt_scoring import PromptLogprobs
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta, TextRequest
from shortfin_apps.llm.serving.text.detokenizer import Detokenizer
from shortfin_apps.llm.serving.text.tokenizer import REPLACEMENT, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Optional fields of answers.

    `token_ids`: return token ids. `prompt_logprobs`: alternatives per token in the field `prompt_logprobs`.
    `echoed_logprobs`: alternatives per prompt token in `logprobs` with `echo`. None: without that field.
    """

    token_ids: bool = False
    prompt_logprobs: int | None = None
    echoed_logprobs: int | None = None

    @property
    def scored(self) -> int | None:
        """The alternatives per token that scoring a prompt must return; None if prompts are not scored."""
        wanted = [n for n in (self.prompt_logprobs, self.echoed_logprobs) if n is not None]
        return max(wanted, default=None)


NO_EXTRAS = Extras()


class Shape(Protocol):
    """Answer format of `/v1/completions` or `/v1/chat/completions`."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def head(self, scores: Sequence[PromptLogprobs]) -> dict[str, Any]:
        """Return fields of the complete answer besides `choices`, and keep `scores` for `choice`.

        `scores`: the prompt's log-probabilities for each choice, or empty.
        """
        ...

    def choice(self, index: int, answer: TextDelta) -> dict[str, Any]:
        """Return one element of `choices` for a complete answer."""
        ...

    def chunks(self, index: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield the elements of `choices` to stream for a delta; none if there is nothing to send yet."""
        ...

    def plain_chunk(self, index: int, text: str) -> dict[str, Any] | None:
        """Return the element that `chunks` yields for a text-only delta with `text`.

        Returns None if the fields around the text still vary between chunks.
        """
        ...


class CompletionShape:
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        requests: Sequence[TextRequest],
        echoes: Sequence[str] | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> None:
        """`echoes`: the prompt text to send before the text of each choice."""
        self._tokenizer = tokenizer
        self._requests = requests
        self._extras = extras
        self._scores: Sequence[PromptLogprobs] = ()
        self._has_begun = [False] * len(requests)
        self._echoes = list(echoes or [""] * len(requests))  # "" once the echo is sent
        # The detokenizers find each token's offset in its choice's text. Lengths of token strings do not add
        # up to it: a character may take several tokens, and special tokens have no text.
        self._detokenizers = [r.detokenizer(tokenizer) for r in requests]
        self._offsets = [0] * len(requests)

    def head(self, scores: Sequence[PromptLogprobs]) -> dict[str, Any]:
        self._scores = scores
        return {}

    def choice(self, index: int, answer: TextDelta) -> dict[str, Any]:
        echo, self._echoes[index] = self._echoes[index], ""
        return {
            "index": index,
            "text": echo + answer.text,
            "logprobs": self._all_logprobs(index, answer, echo),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            **self._extra_fields(index, answer),
        }

    def chunks(self, index: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        if _has_news(delta, self._extras):
            yield self.choice(index, delta)

    def plain_chunk(self, index: int, text: str) -> dict[str, Any] | None:
        if self._extras.token_ids or self._echoes[index]:
            return None
        return self.choice(index, TextDelta(text, ()))

    def _extra_fields(self, index: int, answer: TextDelta) -> dict[str, Any]:
        fields: dict[str, Any] = receipt_field(answer)
        prompt = self._requests[index].prompt_token_ids
        if self._extras.prompt_logprobs is not None:
            fields["prompt_logprobs"] = _by_token_id(
                prompt, self._scores[index], self._extras.prompt_logprobs, self._tokenizer
            )
        if self._extras.token_ids:
            fields["token_ids"] = list(answer.token_ids)
            fields["prompt_token_ids"] = None if self._has_begun[index] else list(prompt)
            self._has_begun[index] = True
        return fields

    def _all_logprobs(self, index: int, answer: TextDelta, echo: str) -> dict[str, Any] | None:
        """Return the answer's log-probabilities, after those of an echoed prompt; None if not requested."""
        num_top = self._extras.echoed_logprobs
        if num_top is None:
            return self._logprobs(index, answer)
        self._offsets[index] = len(echo)
        rest = self._logprobs(index, answer) or {}
        echoed = self._echoed_logprobs(self._requests[index].prompt_token_ids, self._scores[index], num_top)
        return {name: [*values, *rest.get(name, [])] for name, values in echoed.items()}

    def _echoed_logprobs(
        self, token_ids: Sequence[int], scores: PromptLogprobs, num_top: int
    ) -> dict[str, list[Any]]:
        texts = [self._tokenizer.token_text(i) for i in token_ids]
        detokenizer = Detokenizer(self._tokenizer, (), skip_special_tokens=True)
        offsets, end = [], 0
        for token_id in token_ids:
            offsets.append(end)
            end += len(detokenizer.push(token_id))
        tops = [
            None if lp is None else self._top(t, _cut(lp, num_top))
            for t, lp in zip(texts, scores, strict=True)
        ]
        return {
            "tokens": texts,
            "token_logprobs": [None if lp is None else lp.logprob for lp in scores],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

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

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        extras: Extras = NO_EXTRAS,
        form: AnswerForm = PLAIN,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._extras = extras
        self._form = form
        self._readers: dict[int, MessageReader] = {}  # one per choice that has started

    def head(self, scores: Sequence[PromptLogprobs]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._extras.prompt_logprobs is not None:
            fields["prompt_logprobs"] = _by_token_id(
                self._prompt_token_ids, scores[0], self._extras.prompt_logprobs, self._tokenizer
            )
        if self._extras.token_ids:
            fields["prompt_token_ids"] = list(self._prompt_token_ids)
        return fields

    def choice(self, index: int, answer: TextDelta) -> dict[str, Any]:
        reader = MessageReader(self._form)
        message = reader.message(answer.text, is_cut=answer.is_cut)
        return {"index": index, "message": message, **self._rest(answer, reader)}

    def chunks(self, index: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        if (reader := self._readers.get(index)) is None:
            reader = self._readers[index] = MessageReader(self._form)
            role = {"role": "assistant", "content": ""}
            yield {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
        is_last = delta.finish_reason is not None
        news = reader.delta(delta.text, is_last=is_last, is_cut=delta.is_cut)
        if news or _has_news(delta._replace(text=""), self._extras):
            yield {"index": index, "delta": news, **self._rest(delta, reader)}

    def plain_chunk(self, index: int, text: str) -> dict[str, Any] | None:
        reader = self._readers.get(index)
        if self._extras.token_ids or reader is None or not reader.is_plain:
            return None
        return next(self.chunks(index, TextDelta(text, ())))

    def _rest(self, delta: TextDelta, reader: MessageReader) -> dict[str, Any]:
        return {
            "logprobs": self._logprobs(delta),
            "finish_reason": reader.finish_reason(delta.finish_reason),
            "stop_reason": delta.stop_reason,
            **({"token_ids": list(delta.token_ids)} if self._extras.token_ids else {}),
            **receipt_field(delta),
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
        # The string of a token with part of a character has U+FFFD, so the token's bytes are unknown here.
        data = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": data}


def _has_news(delta: TextDelta, extras: Extras) -> bool:
    """Whether the delta has anything to send: text, log-probabilities, token ids or a finish reason."""
    has_tokens = extras.token_ids and len(delta.token_ids) > 0
    return bool(delta.text or delta.logprobs or has_tokens) or delta.finish_reason is not None


def _cut(logprobs: TokenLogprobs, num_top: int) -> TokenLogprobs:
    """Return `logprobs` with at most `num_top` alternatives."""
    return logprobs._replace(top=logprobs.top[:num_top])


def _by_token_id(
    token_ids: Sequence[int], scores: PromptLogprobs, num_top: int, tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each prompt token, an object keyed by token id.

    The object has the prompt token and its `num_top` alternatives. The list's first element is None.
    """
    return [
        None if logprobs is None else _ranked(token_id, _cut(logprobs, num_top), tokenizer)
        for token_id, logprobs in zip(token_ids, scores, strict=True)
    ]


def _ranked(token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    of_token = (token_id, logprobs.logprob, logprobs.rank)
    ranked = [of_token, *((i, logprob, place) for place, (i, logprob) in enumerate(logprobs.top, 1))]
    return {
        str(i): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(i)}
        for i, logprob, rank in reversed(ranked)  # of equal keys, the token itself is written last and stays
    }


def usage(requests: Sequence[TextRequest], generated: Sequence[int], cached: Sequence[int]) -> dict[str, Any]:
    """Return OpenAI's token counts. A prompt with `n` choices counts once.

    `generated`, `cached`: generated and cached tokens of each request.
    """
    firsts = [index for index, request in enumerate(requests) if request.choice == 0]
    prompt_tokens = sum(len(requests[index].prompt_token_ids) for index in firsts)
    completion_tokens = sum(generated)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached[index] for index in firsts)},
    }
