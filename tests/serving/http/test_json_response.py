from __future__ import annotations

import threading
from typing import Any

import orjson
import pytest

from shortfin_apps.llm.components.request.messages import TokenLogprobs
from shortfin_apps.llm.serving.dialects.feed import Piece
from shortfin_apps.llm.serving.dialects.output_parser import OutputParser
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta
from shortfin_apps.llm.serving.frontend.text_workers import TextWorkers
from shortfin_apps.llm.serving.http import json_response
from shortfin_apps.llm.serving.http.json_response import CHARS_EACH, FEW, encoded, made, num_logprobs, work_of
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.serving.api.harness import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    MESSAGES_ROUTE,
    NATIVE,
    RESPONSES,
    TOKENIZER,
    Harness,
)
from tests.serving.api.scripted_engine import forever
from tests.serving.api.test_tools import harness_of

IDS = [5] * 100


def test_alternatives_are_counted() -> None:
    several = TokenLogprobs(-1.0, ((5, -2.0), (6, -3.0)), 3)
    assert num_logprobs([None, several, TokenLogprobs(-1.0, (), 1)]) == 4


def test_long_texts_count_as_work() -> None:
    answer = TextDelta("x" * (3 * CHARS_EACH), (5,), (TokenLogprobs(-1.0, ((5, -2.0),), 1),))
    assert work_of(answer) == 3 + 2


async def test_much_work_is_done_in_a_thread() -> None:
    workers = TextWorkers()
    try:
        assert await made(workers, FEW, threading.current_thread) is threading.main_thread()
        assert await made(workers, FEW + 1, threading.current_thread) is not threading.main_thread()
    finally:
        workers.close()


def test_a_part_has_no_lone_surrogates() -> None:
    assert orjson.loads(orjson.dumps({"a": encoded(["\ud83d"])})) == {"a": ["\ufffd"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": IDS, "max_tokens": 1, "prompt_logprobs": 20}),
        (COMPLETIONS, {"prompt": IDS, "max_tokens": 1, "echo": True, "logprobs": 20}),
        (COMPLETIONS, {"prompt": [5], "max_tokens": 100, "logprobs": 20}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 80}], "max_tokens": 1, "prompt_logprobs": 20}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 80, "logprobs": True, "top_logprobs": 20}),
        (
            NATIVE,
            {"input_ids": IDS, "return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": 0},
        ),
    ],
)
async def test_many_log_probabilities_of_an_answer_do_not_hold_up_others(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    text_of, threads = Tokenizer.token_text, set[threading.Thread]()

    def told(self: Tokenizer, token_id: int) -> str:
        threads.add(threading.current_thread())
        return text_of(self, token_id)

    monkeypatch.setattr(Tokenizer, "token_text", told)
    response = await Harness(forever(TOKENIZER, "the ")).post(path, body)
    assert response.status_code == 200, response.text
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("length", [1, 190])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        (RESPONSES, {"input": "hi"}),
        (MESSAGES_ROUTE, {"model": "tiny", "messages": MESSAGES, "max_tokens": 300}),
    ],
)
async def test_a_long_answer_is_parsed_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], length: int
) -> None:
    monkeypatch.setattr(json_response, "FEW", 9)
    push, threads = OutputParser.push, list[threading.Thread]()

    def told(self: OutputParser, text: str) -> list[Piece]:
        threads.append(threading.current_thread())
        return push(self, text)

    monkeypatch.setattr(OutputParser, "push", told)
    response = await harness_of("<think>" + "x" * length).post(path, body)
    assert response.status_code == 200, response.text
    [thread] = threads
    assert (thread is threading.main_thread()) == (length == 1)
