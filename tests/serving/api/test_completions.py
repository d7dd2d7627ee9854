from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from shortfin_apps.llm.contract.errors import InvocationError
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.serving.api.harness import (
    BASE_URL,
    CHAT,
    COMPLETIONS,
    MAX_SEQ_LEN,
    MESSAGES,
    MODEL,
    TOKENIZER,
    Harness,
    events_of,
)
from tests.serving.api.scripted_engine import failing, forever
from tests.serving.text.tiny_tokenizers import (
    BOS,
    EOS,
    sentencepiece_tokenizer,
)

NUM_TOKENS = len(TOKENIZER.encode("the end")) + 1  # and end-of-sequence
PROMPT_TOKENS = len(TOKENIZER.encode(f"{BOS}[user]hi\n[assistant]"))


def client_of(harness: Harness) -> openai.AsyncOpenAI:
    http_client: Any = harness.client  # it accepts both versions of httpx, its annotation one
    return openai.AsyncOpenAI(api_key="-", base_url=f"{BASE_URL}/v1", http_client=http_client, max_retries=0)


@pytest_asyncio.fixture
async def client(harness: Harness) -> AsyncIterator[openai.AsyncOpenAI]:
    yield client_of(harness)


async def test_chat_with_openais_client(harness: Harness, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "the end")
    assert (choice.finish_reason, answer.object, answer.created) == ("stop", "chat.completion", 1234)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == PROMPT_TOKENS
    assert answer.usage.completion_tokens == NUM_TOKENS
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    [call] = harness.engine.calls
    assert TOKENIZER.decode(call.prompt_token_ids, skip_special_tokens=False) == f"{BOS}[user]hi\n[assistant]"
    assert call.params.max_tokens == MAX_SEQ_LEN - PROMPT_TOKENS  # the rest of the context
    assert call.params.temperature == 1.0


async def test_streamed_chat_with_openais_client(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    *pieces, last = chunks
    for index in (0, 1):
        mine = [c for chunk in pieces for c in chunk.choices if c.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == "the end"
        assert [c.finish_reason for c in mine][-1] == "stop"
    assert all(chunk.usage is None for chunk in pieces)
    assert last.usage is not None
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (PROMPT_TOKENS, 2 * NUM_TOKENS)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "hi"})])
async def test_each_chunk_may_have_the_usage_so_far(
    harness: Harness, path: str, body: dict[str, Any]
) -> None:
    """As benchmarks for vLLM ask for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(await harness.post(path, {**body, "stream": True, "stream_options": options}))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-2:] == [NUM_TOKENS] * 2
    assert len(set(counts)) > 3
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1


async def test_completions_with_openais_client(harness: Harness, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="hi", echo=True, max_tokens=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hithe", "length")
    await client.completions.create(model=MODEL, prompt="hi")
    assert harness.engine.calls[1].params.max_tokens == 16


async def test_streamed_completions_with_openais_client(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model=MODEL, prompt="hi", stream=True, echo=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hithe end"
    assert chunks[-1].choices[0].finish_reason == "stop"


ECHOES: list[tuple[Any, list[str], int]] = [
    (f"{BOS} hi{EOS}", [f"{BOS} hi{EOS}"], 5),
    (TOKENIZER.encode(f"{BOS} hi{EOS}"), [f"{BOS} hi{EOS}"], 5),
    ([f"{BOS}a", "b\r\n "], [f"{BOS}a", "b\r\n "], 6),
    ([TOKENIZER.encode(f"a{BOS}"), [1]], [f"a{BOS}", TOKENIZER.decode([1])], 3),
]


@pytest.mark.parametrize(("prompt", "echoed", "num_tokens"), ECHOES)
async def test_echo_returns_the_prompt_unchanged(
    harness: Harness, prompt: Any, echoed: list[str], num_tokens: int
) -> None:
    body = {"prompt": prompt, "echo": True, "n": 2, "max_tokens": 1}
    answer = (await harness.post(COMPLETIONS, body)).json()
    assert [c["text"] for c in answer["choices"]] == [f"{text}the" for text in echoed for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == num_tokens


async def test_prompts_of_token_ids_are_decoded_in_a_thread(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, threads = Tokenizer.decode, list[threading.Thread]()

    def noted(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(token_ids) == 99:
            threads.append(threading.current_thread())
        return decode(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", noted)
    await harness.post(COMPLETIONS, {"prompt": [[1] * 99] * 2, "echo": True, "max_tokens": 0})
    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_echo_keeps_the_space_before_a_sentencepiece_prompts_continuation(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path)
    harness = Harness(forever(tokenizer, "world"), tokenizer=tokenizer)
    for prompt in ("hello", tokenizer.encode("hello")[1:]):
        body = {"prompt": prompt, "echo": True, "max_tokens": 2}
        [choice] = (await harness.post(COMPLETIONS, body)).json()["choices"]
        assert choice["text"] == "hello world"


EMPTY: list[tuple[Any, list[str], int]] = [
    ("", [""], 0),
    ([], [""], 0),
    ([[]], [""], 0),
    (["", "a"], ["", "a"], 1),
]


FULL = [([1] * MAX_SEQ_LEN, [TOKENIZER.decode([1]) * MAX_SEQ_LEN], MAX_SEQ_LEN)]


@pytest.mark.parametrize(("prompt", "echoed", "num_tokens"), [*ECHOES, *EMPTY, *FULL])
async def test_echo_with_zero_max_tokens_returns_only_the_prompt(
    harness: Harness, prompt: Any, echoed: list[str], num_tokens: int
) -> None:
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "n": 2}
    response = await harness.post(COMPLETIONS, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    choices = [
        {"index": i, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        for i, text in enumerate(text for text in echoed for _ in range(2))
    ]
    assert answer["choices"] == choices
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_tokens, 0)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events_of(await harness.post(COMPLETIONS, streamed))
    assert [chunk["choices"] for chunk in chunks] == [[choice] for choice in choices]
    assert last["usage"] == usage
    assert not harness.engine.calls


async def test_zero_max_tokens_compute_nothing(harness: Harness) -> None:
    answer = (await harness.post(COMPLETIONS, {"prompt": "a", "max_tokens": 0})).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert not harness.engine.calls


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_the_prompt_is_scored_once_for_all_its_choices(harness: Harness, max_tokens: int) -> None:
    prompts = [TOKENIZER.encode("a b c"), [5]]
    body = {"prompt": prompts, "n": 2, "max_tokens": max_tokens, "prompt_logprobs": 1}
    answer = (await harness.post(COMPLETIONS, body)).json()
    [scored] = [call for call in harness.engine.calls if call.params.forced_token_ids]
    assert [*scored.prompt_token_ids, *scored.params.forced_token_ids] == prompts[0]
    assert len(harness.engine.calls) == 1 + (4 if max_tokens else 0)
    of_choices = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert of_choices[2:] == [[None]] * 2
    assert of_choices[0] == of_choices[1]
    first, *rest = of_choices[0]
    assert first is None
    for token_id, each in zip(prompts[0][1:], rest, strict=True):
        text = TOKENIZER.token_text(token_id)
        assert each[str(token_id)] == {"logprob": -0.5, "rank": 1, "decoded_token": text}
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompts[0]) + 1, 4 * max_tokens)


async def test_prompt_logprobs_of_a_chat(harness: Harness) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": 0, "return_token_ids": True}
    answer = (await harness.post(CHAT, body)).json()
    assert (
        len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    )
    assert answer["prompt_logprobs"][0] is None
    assert all(len(each) == 1 for each in answer["prompt_logprobs"][1:])


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_echo_with_logprobs_has_those_of_the_prompt(harness: Harness, max_tokens: int) -> None:
    """OpenAI's way to score a text."""
    body = {"prompt": "a b", "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    [choice] = (await harness.post(COMPLETIONS, body)).json()["choices"]
    logprobs, prompt = choice["logprobs"], TOKENIZER.encode("a b")
    assert len(set(map(len, logprobs.values()))) == 1
    assert logprobs["tokens"][: len(prompt)] == [TOKENIZER.token_text(i) for i in prompt]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(prompt) - 1 + max_tokens)
    assert logprobs["top_logprobs"][0] is None
    for token, start in zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True):
        assert choice["text"][start:].startswith(token)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_token_ids_are_returned_whole_and_streamed(harness: Harness, path: str) -> None:
    """Those of the prompt once: of a completion with the choice, of a chat beside the choices."""
    body = {"prompt": "a", "messages": MESSAGES, "return_token_ids": True, "max_tokens": 9, "n": 2}
    del body["messages" if path == COMPLETIONS else "prompt"]
    whole = (await harness.post(path, body)).json()
    ids = [*TOKENIZER.encode("the end"), *TOKENIZER.eos_token_ids]
    assert [choice["token_ids"] for choice in whole["choices"]] == [ids, ids]
    chunks = events_of(await harness.post(path, {**body, "stream": True}))
    streamed = [chunk["choices"][0] for chunk in chunks]
    for index in (0, 1):
        deltas = [choice.get("token_ids", []) for choice in streamed if choice["index"] == index]
        assert list(chain.from_iterable(deltas)) == ids
    prompts = [prompt for each in [*chunks, *streamed] if (prompt := each.get("prompt_token_ids"))]
    expected = whole["prompt_token_ids"] if path == CHAT else whole["choices"][0]["prompt_token_ids"]
    assert prompts == [expected] * (1 if path == CHAT else 2)
    assert len(expected) == whole["usage"]["prompt_tokens"]


async def test_extra_fields_reach_the_engine(harness: Harness) -> None:
    body = {"top_k": 7, "min_p": 0.1, "ignore_eos": True, "min_tokens": 2, "stop_token_ids": [4]}
    body |= {"forced_token_ids": [3]}  # the front end's own
    body |= {"presence_penalty": 0.5, "logit_bias": {"7": 100}, "bad_words": ["b"], "allowed_token_ids": [7]}
    await harness.post(CHAT, {"messages": MESSAGES, "cache_salt": "s", "seed": 3, "max_tokens": 5, **body})
    [call] = harness.engine.calls
    params = call.params
    assert (params.top_k, params.min_p, params.ignore_eos, params.min_tokens) == (7, 0.1, True, 2)
    assert params.forced_token_ids == ()
    assert (params.presence_penalty, params.logit_bias) == (0.5, ((7, 100),))
    assert (len(params.bad_words), params.allowed_token_ids) == (1, frozenset({7}))
    assert (params.seed, params.max_tokens, call.cache_salt) == (3, 5, "s")


async def test_stop_strings_are_left_out_by_default() -> None:
    harness = Harness(forever(TOKENIZER, "the end "))
    for include, text in ((False, "the "), (True, "the end")):
        body = {"prompt": "a", "stop": ["x", "end"], "include_stop_str_in_output": include}
        [choice] = (await harness.post(COMPLETIONS, body)).json()["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", "end")


async def test_models(harness: Harness, client: openai.AsyncOpenAI) -> None:
    [card] = [m async for m in client.models.list()]
    assert (card.id, card.created) == (MODEL, 1234)
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="other"):
        await client.chat.completions.create(model="other", messages=MESSAGES)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETIONS, {"prompt": [99999]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt"),
    (COMPLETIONS, {"prompt": "7" * 900_000}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", "7" * 900_000]}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": MAX_SEQ_LEN}, "max_tokens"),
    (COMPLETIONS, {"prompt": "", "echo": True, "max_tokens": 1}, "prompt"),
    (COMPLETIONS, {"prompt": [99999], "echo": True, "max_tokens": 0}, "prompt"),
    (COMPLETIONS, {"prompt": [1] * (MAX_SEQ_LEN + 1), "echo": True, "max_tokens": 0}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 0, "top_p": 2}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (CHAT, {"messages": MESSAGES, "prompt_logprobs": -1}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "suffix": "x"}, "suffix"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "temperature": "warm"}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages.role"),
    (CHAT, {"messages": [{"role": "user", "content": "7" * 900_000}]}, "messages"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools.function"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json"}}, "response_format.type"),
    (CHAT, {"messages": MESSAGES, "frequency_penalty": 2.1}, "frequency_penalty"),
    (CHAT, {"messages": MESSAGES, "presence_penalty": "1"}, "presence_penalty"),
    (CHAT, {"messages": MESSAGES, "repetition_penalty": -1}, "repetition_penalty"),
    *(
        (CHAT, {"messages": MESSAGES, "logit_bias": bias}, "logit_bias")
        for bias in (
            *({"a": 1}, {"-1": 1}, {"99999": 1}, {"1": "1"}, {"1": True}, {"1": 100.5}, {"1": 1e300}),
            *({"9" * 5000: 1}, {str(i): 0 for i in range(1025)}, [1], [[1]], [["a", 1]], [[1.0, 1]], 5),
        )
    ),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["b" * 129]}, "bad_words"),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["b"] * 257}, "bad_words"),
    (COMPLETIONS, {"prompt": "a", "bad_words": [1]}, "bad_words"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [99999]}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "a", "typical_p": 1.5}, "typical_p"),
    (CHAT, {"messages": MESSAGES, "top_p": 0}, "top_p"),
]


@pytest.mark.parametrize(("path", "body", "field"), REFUSED, ids=[str(r[1])[:60] for r in REFUSED])
async def test_invalid_fields_are_refused_by_name(
    harness: Harness, path: str, body: dict[str, Any], field: str
) -> None:
    response = await harness.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert not harness.engine.calls


async def test_values_without_effect_are_accepted(harness: Harness) -> None:
    harmless = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": [], "tools": [], "user": "u"}
    harmless |= {"response_format": {"type": "text"}, "tool_choice": "none", "best_of": 1, "store": False}
    response = await harness.post(CHAT, {"messages": MESSAGES, **harmless})
    assert response.status_code == 200, response.text


async def test_overload_is_a_rate_limit_error_with_retry_after() -> None:
    harness = Harness()
    harness.engine.capacity = 0
    with pytest.raises(openai.RateLimitError) as caught:
        await client_of(harness).chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    assert caught.value.response.headers["retry-after"] == "3"


async def test_a_failure_during_a_stream_reaches_openais_client() -> None:
    harness = Harness(failing(InvocationError("the device failed"), after=TOKENIZER.encode("x")))
    client = client_of(harness)
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="the device failed"):
        _ = [chunk async for chunk in stream]
    with pytest.raises(openai.InternalServerError, match="the device failed"):
        await client.chat.completions.create(model=MODEL, messages=MESSAGES)
