from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.contract.errors import InvocationError
from tests.serving.api.harness import MAX_REQUESTS, MAX_SEQ_LEN, TOKENIZER, Harness, events_of
from tests.serving.api.scripted_engine import failing, forever
from tests.serving.text.tiny_tokenizers import EOS, sentencepiece_tokenizer

PROMPT = "hello"
UPSTREAM_BODY = {  # as sent by upstream's own client
    "text": PROMPT,
    "sampling_params": {"max_completion_tokens": 50, "temperature": 0.7},
    "rid": "0a1b",
    "return_logprob": False,
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "return_text_in_logprobs": False,
    "stream": False,
}


async def answers(harness: Harness, body: object) -> list[dict[str, Any]]:
    response = await harness.post("/generate", body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    responses: list[dict[str, Any]] = response.json()["responses"]
    return responses


async def test_upstreams_request_gets_an_answer_in_upstreams_format(harness: Harness) -> None:
    [answer] = await answers(harness, UPSTREAM_BODY)
    assert answer["prompt"] == PROMPT
    assert [r["text"] for r in answer["responses"]] == ["the end"]
    assert harness.engine.calls[0].params.temperature == 0.7


async def test_put_works_like_post(harness: Harness) -> None:
    response = await harness.client.put("/generate", json={"text": PROMPT})
    assert response.json()["responses"][0]["responses"][0]["text"] == "the end"


async def test_meta_info_has_sglangs_format(harness: Harness) -> None:
    [answer] = await answers(harness, UPSTREAM_BODY)
    ids = [*TOKENIZER.encode("the end"), *TOKENIZER.eos_token_ids]
    assert answer["responses"][0]["output_ids"] == ids
    assert answer["responses"][0]["meta_info"] == {
        "id": "0a1b",
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "prompt_tokens": len(TOKENIZER.encode(PROMPT)),
        "completion_tokens": len(ids),
        "cached_tokens": 3,
    }


async def test_defaults_are_greedy_and_fifty_tokens(harness: Harness) -> None:
    await answers(harness, {"text": PROMPT})
    params = harness.engine.calls[0].params
    assert (params.temperature, params.max_tokens) == (0.0, 50)


async def test_the_default_length_is_cut_to_the_context(harness: Harness) -> None:
    await answers(harness, {"input_ids": [1] * (MAX_SEQ_LEN - 2)})
    assert harness.engine.calls[0].params.max_tokens == 2


async def test_duplicate_prompts_stay_separate(harness: Harness) -> None:
    batch = await answers(harness, {"text": [PROMPT, "other", PROMPT], "rid": ["a", "b", "c"]})
    assert [a["prompt"] for a in batch] == [PROMPT, "other", PROMPT]
    assert [a["responses"][0]["meta_info"]["id"] for a in batch] == ["a", "b", "c"]


async def test_token_ids_alone_and_in_a_batch(harness: Harness) -> None:
    [one] = await answers(harness, {"input_ids": [1, 2], "return_input_ids": True})
    assert (one["prompt"], one["input_ids"]) == (None, [1, 2])
    two = await answers(harness, {"input_ids": [[1, 2], [3]]})
    assert [a["prompt"] for a in two] == [None, None]
    assert [call.prompt_token_ids for call in harness.engine.calls[1:]] == [(1, 2), (3,)]


async def test_n_answers_have_different_seeds(harness: Harness) -> None:
    [answer] = await answers(harness, {"text": PROMPT, "sampling_params": {"n": 3, "seed": 5}})
    assert len(answer["responses"]) == 3
    assert [call.params.seed for call in harness.engine.calls] == [5, 6, 7]


async def test_sampling_params_for_each_prompt(harness: Harness) -> None:
    params = [{"max_new_tokens": 1}, {"max_tokens": 2, "top_k": -1}]
    batch = await answers(harness, {"text": ["a", "b"], "sampling_params": params})
    assert [len(a["responses"][0]["output_ids"]) for a in batch] == [1, 2]
    reason = batch[0]["responses"][0]["meta_info"]["finish_reason"]
    assert reason == {"type": "length", "length": 1}


async def test_sampling_params_reach_the_engine(harness: Harness) -> None:
    sampling: dict[str, Any] = {
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "sampling_seed": 9,
        "min_new_tokens": 2,
    }
    sampling |= {"ignore_eos": True, "stop_token_ids": [4], "temperature": 2}
    penalties = {
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "typical_p": 0.9,
    }
    sampling |= penalties | {"logit_bias": [[5, -1.5]], "bad_words": ["b"], "allowed_token_ids": [4, 5]}
    await answers(harness, {"text": PROMPT, "sampling_params": sampling, "cache_salt": "s"})
    [call] = harness.engine.calls
    params = call.params
    assert (params.top_k, params.top_p, params.min_p, params.seed, params.min_tokens) == (3, 0.5, 0.1, 9, 2)
    assert (params.ignore_eos, params.stop_token_ids, params.temperature) == (True, frozenset({4}), 2.0)
    assert {name: getattr(params, name) for name in penalties} == penalties
    assert (params.logit_bias, params.allowed_token_ids) == (((5, -1.5),), frozenset({4, 5}))
    assert params.bad_words == (tuple(TOKENIZER.encode("b", add_special_tokens=False)),)
    assert call.cache_salt == "s"


@pytest.mark.parametrize(("no_stop_trim", "text"), [(False, "the"), (True, "the en")])
async def test_stop_strings_end_the_request(no_stop_trim: bool, text: str) -> None:
    harness = Harness(forever(TOKENIZER, "the end"))
    sampling = {"stop": [" en"], "no_stop_trim": no_stop_trim}
    [answer] = await answers(harness, {"text": PROMPT, "sampling_params": sampling})
    assert answer["responses"][0]["text"] == text
    finish = answer["responses"][0]["meta_info"]["finish_reason"]
    assert finish == {"type": "stop", "matched": " en"}
    assert len(harness.engine.aborted) == 1


async def test_special_tokens_are_kept_on_request() -> None:
    harness = Harness(forever(TOKENIZER, f"a{EOS}"))
    sampling = {"skip_special_tokens": False, "max_tokens": 2}
    [answer] = await answers(harness, {"text": PROMPT, "sampling_params": sampling})
    assert answer["responses"][0]["text"] == f"a{EOS}"


async def test_logprobs_have_sglangs_format(harness: Harness) -> None:
    body = {"text": PROMPT, "return_logprob": True, "top_logprobs_num": 2}
    [answer] = await answers(harness, body | {"sampling_params": {"max_tokens": 1}})
    meta = answer["responses"][0]["meta_info"]
    [token_id] = answer["responses"][0]["output_ids"]
    assert meta["output_token_logprobs"] == [[-0.5, token_id, "the"]]
    assert [pair[:2] for pair in meta["output_top_logprobs"][0]] == [[-0.5, token_id], [-1.0, token_id + 1]]


@pytest.mark.parametrize("start", [0, 1, 2])
async def test_logprobs_of_the_prompt_have_sglangs_format(harness: Harness, start: int) -> None:
    """Those of the tokens from `logprob_start_len` on; the tokens before them are given to the model."""
    prompts = [TOKENIZER.encode("a b c"), [5, 6, 7]]
    body = {"input_ids": prompts, "return_logprob": True, "logprob_start_len": [start, -1]}
    scored, other = await answers(harness, body | {"sampling_params": {"max_tokens": 1, "n": 2}})
    [call] = [call for call in harness.engine.calls if call.params.forced_token_ids]
    assert len(call.prompt_token_ids) == max(1, start)
    for response in scored["responses"]:
        values: list[float | None] = [-0.5] * (len(prompts[0]) - start)
        values[0] = None if start == 0 else -0.5
        got = response["meta_info"]["input_token_logprobs"]
        expected = zip(values, prompts[0][start:], strict=True)
        assert got == [[value, i, TOKENIZER.token_text(i)] for value, i in expected]
        assert len(response["meta_info"]["input_top_logprobs"]) == len(values)
    assert "input_token_logprobs" not in other["responses"][0]["meta_info"]


async def test_logprobs_of_a_prompt_are_not_streamed(harness: Harness) -> None:
    body = {"text": "a", "return_logprob": True, "logprob_start_len": 0, "stream": True}
    response = await harness.post("/generate", body)
    assert response.status_code == 400
    assert "`logprob_start_len`" in response.json()["error"]


async def test_zero_tokens_are_an_empty_answer_among_others(harness: Harness) -> None:
    body = {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 0, "n": 2}, {"max_new_tokens": 1}]}
    empty, other = await answers(harness, body)
    assert [each["output_ids"] for each in empty["responses"]] == [[], []]
    reason = empty["responses"][0]["meta_info"]["finish_reason"]
    assert reason == {"type": "length", "length": 0}
    assert len(other["responses"][0]["output_ids"]) == 1
    assert len(harness.engine.calls) == 1
    events = events_of(await harness.post("/generate", {**body, "stream": True}))
    assert {event["index"]: len(event["output_ids"]) for event in events} == {0: 0, 1: 0, 2: 1}


async def test_a_sentencepiece_token_keeps_its_space(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path)
    harness = Harness(forever(tokenizer, "world"), tokenizer=tokenizer)
    body = {"input_ids": tokenizer.encode("hello"), "return_logprob": True}
    [answer] = await answers(harness, body | {"sampling_params": {"max_tokens": 2}})
    assert answer["responses"][0]["text"] == " world"
    triples = answer["responses"][0]["meta_info"]["output_token_logprobs"]
    assert [text for _, _, text in triples] == ["<s>", " world"]


async def test_a_stream_is_cumulative(harness: Harness) -> None:
    response = await harness.post("/generate", {"text": PROMPT, "stream": True, "rid": "r"})
    events = events_of(response)
    whole = (await answers(harness, {"text": PROMPT, "rid": "r"}))[0]["responses"][0]
    assert events[-1] == {**whole, "index": 0}
    for earlier, later in pairwise(events):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][:-1] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_without_token_texts(harness: Harness, stream: bool) -> None:
    body = {"text": PROMPT, "return_logprob": True, "return_text_in_logprobs": False, "stream": stream}
    response = await harness.post("/generate", body)
    item = events_of(response)[0] if stream else response.json()["responses"][0]["responses"][0]
    [first, *_] = item["meta_info"]["output_token_logprobs"]
    assert first[0] == -0.5
    assert first[2] is None


async def test_a_stream_has_each_tokens_logprobs_once(harness: Harness) -> None:
    body = {"text": PROMPT, "return_logprob": True, "top_logprobs_num": 2, "rid": "r"}
    [whole] = (await answers(harness, body))[0]["responses"]
    events = events_of(await harness.post("/generate", {**body, "stream": True}))
    for name in ("output_token_logprobs", "output_top_logprobs"):
        parts = [event["meta_info"].pop(name) for event in events]
        assert list(chain.from_iterable(parts)) == whole["meta_info"].pop(name)
        ends = [event["meta_info"]["completion_tokens"] for event in events]
        assert [len(part) for part in parts] == [end - start for start, end in pairwise([0, *ends])]
    assert events[-1] == {**whole, "index": 0}


async def test_events_of_a_streamed_batch_have_an_index(harness: Harness) -> None:
    body = {"text": ["a", "b"], "stream": True, "sampling_params": {"n": 2}}
    last = {e["index"]: e for e in events_of(await harness.post("/generate", body))}
    assert sorted(last) == [0, 1, 2, 3]
    assert all(e["text"] == "the end" and e["meta_info"]["finish_reason"] for e in last.values())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "text"),
    ({"text": "a", "input_ids": [1]}, "text"),
    ({"text": 5}, "text"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": ["a", ""]}, "text"),
    ({"text": "a " * MAX_SEQ_LEN}, "text"),
    ({"text": "7" * 900_000}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids"),
    ({"input_ids": [1, [2]]}, "input_ids"),
    ({"input_ids": ["1"]}, "input_ids"),
    ({"input_ids": [True]}, "input_ids"),
    ({"input_ids": [99999]}, "input_ids"),
    ({"input_ids": [-3]}, "input_ids"),
    ({"input_ids": [1] * MAX_SEQ_LEN}, "input_ids"),
    ({"text": ["a", "b"], "rid": "r"}, "rid"),
    ({"text": ["a", "b"], "rid": ["r"]}, "rid"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": "a", "sampling_params": 3}, "sampling_params"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
    ({"text": "a", "image_data": "x"}, "image_data"),
    ({"text": "a", "lora_path": "x"}, "lora_path"),
]
REFUSED_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_new_tokens": 0, "min_new_tokens": 1}, "min_new_tokens"),
    ({"max_new_tokens": MAX_SEQ_LEN}, "max_new_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 3, "max_new_tokens": 4}, "max_tokens"),
    ({"min_new_tokens": 51}, "min_new_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"seed": -2}, "seed"),
    ({"sampling_seed": 2**63}, "sampling_seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"num_beams": 0}, "num_beams"),
    ({"num_beams": 5}, "num_beams"),
    ({"num_beams": 2, "stop": "a"}, "stop"),
    ({"num_beams": 2, "n": 2}, "n"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"typical_p": 0}, "typical_p"),
    ({"num_beams": 2, "bad_words": ["a"]}, "bad_words"),
    ({"num_beams": 2, "repetition_penalty": 1.1}, "repetition_penalty"),
    ({"dry_multiplier": 0.5}, "dry_multiplier"),
    ({"json_schema": "{"}, "json_schema"),
    ({"num_beams": 2, "regex": "a"}, "num_beams"),
    ({"ebnf_full_assistant": True}, "ebnf_full_assistant"),
]
CASES = REFUSED + [({"text": "a", "sampling_params": s}, f"sampling_params.{f}") for s, f in REFUSED_SAMPLING]


@pytest.mark.parametrize(("body", "field"), CASES, ids=[str(body)[:60] for body, _ in CASES])
@pytest.mark.parametrize("stream", [False, True])
async def test_invalid_fields_are_refused_by_name(
    harness: Harness, body: dict[str, Any], field: str, stream: bool
) -> None:
    response = await harness.post("/generate", {**body, "stream": stream})
    assert response.status_code == 400, response.text
    error = response.json()
    assert error["code"] == "INVALID_REQUEST_ARGS"
    assert f"`{field}`" in error["error"]
    assert not harness.engine.calls


async def test_beams_beyond_the_exported_top_k_have_upstreams_error(harness: Harness) -> None:
    response = await harness.post("/generate", {"text": "a", "sampling_params": {"num_beams": 5}})
    assert response.status_code == 400
    assert (response.json()["exported_topk"], response.json()["requested_topk"]) == (4, 5)


async def test_each_prompt_has_its_own_number_of_beams() -> None:
    harness = Harness(forever(TOKENIZER, "a"))
    params = [{"num_beams": beams, "max_tokens": 3} for beams in (3, 1, 2)]
    batch = await answers(harness, {"text": ["a", "b", "c"], "sampling_params": params})
    texts = [[r["text"] for r in answer["responses"]] for answer in batch]
    assert texts == [["aaa", "aab", "aba"], ["aaa"], ["aaa", "aab"]]
    meta = batch[0]["responses"][2]["meta_info"]
    assert (meta["completion_tokens"], meta["finish_reason"]) == (3, {"type": "length", "length": 3})
    await harness.client.aclose()


async def test_logprobs_of_beams() -> None:
    harness = Harness(forever(TOKENIZER, "a"))
    body = {"text": PROMPT, "return_logprob": True, "top_logprobs_num": 2}
    [answer] = await answers(harness, body | {"sampling_params": {"max_tokens": 2, "num_beams": 2}})
    [a, b] = TOKENIZER.encode("ab")
    meta = answer["responses"][1]["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, a, "a"], [-1.0, b, "b"]]
    assert [[i for _, i, _ in top] for top in meta["output_top_logprobs"]] == [[a, b]] * 2
    await harness.client.aclose()


async def test_beams_cannot_be_streamed(harness: Harness) -> None:
    body = {"text": "a", "stream": True, "sampling_params": {"num_beams": 2}}
    response = await harness.post("/generate", body)
    assert (response.status_code, response.json()["code"]) == (400, "INVALID_REQUEST_ARGS")
    assert "`stream`" in response.json()["error"]
    assert not harness.engine.calls


async def test_a_beam_search_that_is_not_admitted_is_429() -> None:
    harness = Harness()
    harness.engine.capacity = 0
    response = await harness.post("/generate", {"text": "a", "sampling_params": {"num_beams": 2}})
    assert response.status_code == 429


async def test_too_many_stop_tokens_for_the_beams_are_refused_by_name(harness: Harness) -> None:
    sampling = {"num_beams": 4, "stop_token_ids": list(range(20))}
    response = await harness.post("/generate", {"text": "a", "sampling_params": sampling})
    assert response.status_code == 400
    assert "`sampling_params.stop_token_ids`" in response.json()["error"]


async def test_more_sequences_than_the_queue_holds_are_refused(harness: Harness) -> None:
    response = await harness.post("/generate", {"text": ["a"] * (MAX_REQUESTS + 1)})
    assert response.status_code == 400


async def test_inert_and_unknown_fields_are_ignored(harness: Harness) -> None:
    body = {"text": "a", "modalities": ["x"], "is_single": True, "image_data": None, "new_field": 1}
    await answers(harness, body | {"sampling_params": {"dry_multiplier": 0.0, "num_beams": 1}})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_429_and_admits_nothing(stream: bool) -> None:
    harness = Harness()
    harness.engine.capacity = 1
    response = await harness.post("/generate", {"text": ["a", "b"], "stream": stream})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["code"] == "QUEUE_FULL"
    assert not harness.engine.live


async def test_a_draining_server_is_503(harness: Harness) -> None:
    await harness.engine.drain(0)
    response = await harness.post("/generate", {"text": "a"})
    assert (response.status_code, response.json()["code"]) == (503, "UNAVAILABLE")


async def test_a_failed_invocation_is_an_error_whole_and_streamed() -> None:
    harness = Harness(failing(InvocationError("the device failed"), after=TOKENIZER.encode("x")))
    response = await harness.post("/generate", {"text": "a"})
    assert response.status_code == 500
    assert response.json() == {"error": "the device failed", "code": "INVOCATION_FAILED"}
    *_, last = events_of(await harness.post("/generate", {"text": "a", "stream": True}))
    assert last == {"error": "the device failed", "code": "INVOCATION_FAILED"}
