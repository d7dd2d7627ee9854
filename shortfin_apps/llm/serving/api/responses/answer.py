"""Collects one answer of `/v1/responses`: its blocks, token counts and end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.blocks import BlockKind, BlockReader, Change, Grew
from shortfin_apps.llm.serving.api.chat import ChatTurn, end_of
from shortfin_apps.llm.serving.api.receipts import receipt_field
from shortfin_apps.llm.serving.api.responses.shapes import ResponseShape, Usage
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta
from shortfin_apps.llm.serving.http.errors import message_of
from shortfin_apps.llm.serving.text.tokenizer import LONG_TEXT, Tokenizer


class ResponseAnswer:
    """Reads the answer to a turn from one or several deltas. `clock` is in seconds since the epoch."""

    def __init__(
        self, shape: ResponseShape, turn: ChatTurn, tokenizer: Tokenizer, clock: Callable[[], float]
    ) -> None:
        self.shape = shape
        self._prompt_tokens = len(turn.requests[0].prompt_token_ids)
        self._reader = BlockReader(turn.form)
        self._thoughts = ThoughtTokens(tokenizer)
        self._clock = clock
        self._generated = self._cached = 0
        self._has_ended = self._is_cut = False
        self._ended_at = 0
        self._receipt: dict[str, Any] = {}

    def add(self, delta: TextDelta) -> list[Change]:
        """Add a delta and return its changes. Raises RequestAbortedError if the answer was aborted."""
        self._generated += len(delta.token_ids)
        self._cached = max(self._cached, delta.num_cached_tokens)
        is_last = delta.finish_reason is not None
        changes = list(self._reader.read(delta.text, is_last=is_last, is_cut=delta.is_cut))
        for change in changes:
            if isinstance(change, Grew) and change.block.kind is BlockKind.THOUGHT:
                self._thoughts.push(change.text)
        if is_last:
            self._is_cut = end_of(delta) is FinishReason.LENGTH
            self._has_ended, self._ended_at = True, int(self._clock())
            self._receipt = receipt_field(delta)
        return changes

    @property
    def status(self) -> str:
        """The response's status, after its last delta."""
        return "incomplete" if self._is_cut else "completed"

    def status_of(self, index: int) -> str:
        """Return the status of a finished output item: only the last of an answer may be incomplete."""
        is_last = index == len(self._reader.blocks) - 1
        return "incomplete" if is_last and (self._is_cut or not self._has_ended) else "completed"

    def output(self) -> list[dict[str, Any]]:
        """Return the output items so far."""
        return [self.shape.item(block, self.status_of(block.index)) for block in self._reader.blocks]

    def response(self) -> dict[str, Any]:
        """Return the response, after its last delta."""
        done = None if self._is_cut else self._ended_at
        whole = self.shape.response(self.status, self.output(), usage=self._usage(), completed_at=done)
        return whole | self._receipt

    def failure(self, error: Exception) -> dict[str, Any]:
        """Return a failed response. `invalid_prompt` is OpenAI's closest code for an invalid request."""
        code = "invalid_prompt" if isinstance(error, InvalidRequestError) else "server_error"
        error_field = {"code": code, "message": message_of(error)}
        return self.shape.response("failed", self.output(), usage=self._usage(), error=error_field)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            output_tokens=self._generated,
            thought_tokens=self._thoughts.num_tokens,
        )


class ThoughtTokens:
    """Counts the tokens of a model's thoughts, tokenised in pieces of LONG_TEXT characters.

    The number is therefore the same for complete and streamed answers. It may differ slightly from the number
    of generated tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rest = ""
        self._num_counted = 0

    def push(self, text: str) -> None:
        """Append text; takes a few milliseconds per LONG_TEXT characters."""
        self._rest += text
        while len(self._rest) >= LONG_TEXT:
            self._num_counted += self._count(self._rest[:LONG_TEXT])
            self._rest = self._rest[LONG_TEXT:]

    @property
    def num_tokens(self) -> int:
        return self._num_counted + (self._count(self._rest) if self._rest else 0)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))
