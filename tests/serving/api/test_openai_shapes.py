from __future__ import annotations

from pathlib import Path

from tests.serving.api.harness import CHAT, COMPLETIONS, MESSAGES, TOKENIZER, Harness, events_of
from tests.serving.api.scripted_engine import saying
from tests.serving.text.tiny_tokenizers import sentencepiece_tokenizer


async def test_completion_logprobs(harness: Harness) -> None:
    body = {"prompt": "a", "logprobs": 2, "max_tokens": 2}
    whole = (await harness.post(COMPLETIONS, body)).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == ["the", " "]
    assert whole["token_logprobs"] == [-0.5, -0.5]
    assert whole["text_offset"] == [0, 3]
    assert whole["top_logprobs"][0]["the"] == -0.5
    chunks = events_of(await harness.post(COMPLETIONS, body | {"stream": True}))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 3]


async def test_text_offsets_of_sentencepiece_tokens(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path)
    harness = Harness(saying(tokenizer, "world 😀!"), tokenizer=tokenizer)
    body = {"prompt": "hello", "logprobs": 1}
    [choice] = (await harness.post(COMPLETIONS, body)).json()["choices"]
    # Its first token is <s>, as the script generates all tokens of an encoded text.
    logprobs = choice["logprobs"]
    assert choice["text"] == " world 😀!"
    assert logprobs["tokens"] == ["<s>", " world", " ", *["\ufffd"] * 4, "!", "</s>"]
    assert logprobs["text_offset"] == [0, 0, 6, 7, 7, 7, 7, 8, 9]
    assert list(logprobs["top_logprobs"][1]) == [" world"]
    chunks = events_of(await harness.post(COMPLETIONS, body | {"stream": True}))
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == " world 😀!"
    offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
    assert offsets == logprobs["text_offset"]


async def test_chat_logprobs(harness: Harness) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 1}
    [choice] = (await harness.post(CHAT, body)).json()["choices"]
    [token] = choice["logprobs"]["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("the", -0.5, [116, 104, 101])
    assert [t["logprob"] for t in token["top_logprobs"]] == [-0.5, -1.0]


async def test_a_partial_character_has_no_bytes() -> None:
    harness = Harness(saying(TOKENIZER, "€"))
    body = {"messages": MESSAGES, "logprobs": True, "max_tokens": 1}
    [choice] = (await harness.post(CHAT, body)).json()["choices"]
    assert choice["logprobs"]["content"][0]["bytes"] is None
