from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from bench.peers.in_process.completions import make_app
from tests.bench.peers.in_process.counting_engine import CountingEngine


def tokenizer() -> Tokenizer:
    made = Tokenizer(WordLevel({f"w{index}": index for index in range(50)}, unk_token="w0"))
    made.pre_tokenizer = WhitespaceSplit()
    return made


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(make_app(CountingEngine(), tokenizer())) as made:
        yield made


def test_a_stream_has_a_chunk_for_each_token_then_usage_and_the_end(client: TestClient) -> None:
    body = {"prompt": [7, 8], "max_tokens": 3, "stream": True, "ignore_eos": True, "temperature": 0}
    *events, rest = client.post("/v1/completions", json=body).text.split("\n\n")
    assert rest == ""
    assert events.pop() == "data: [DONE]"
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["w9", "w10", "w11"]
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_a_failure_of_the_engine_is_an_event_with_its_message() -> None:
    with TestClient(make_app(CountingEngine(fails_with=RuntimeError("no memory")), tokenizer())) as client:
        text = client.post("/v1/completions", json={"prompt": [1], "max_tokens": 2}).text
    assert json.loads(text.removeprefix("data: "))["error"]["message"] == "no memory"


def test_it_tokenizes_for_the_client(client: TestClient) -> None:
    assert client.post("/tokenize", json={"prompt": "w3 w4"}).json() == {"tokens": [3, 4]}
    assert client.get("/v1/models").json()["data"][0]["id"] == "model"
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("body", [{"prompt": "text", "max_tokens": 1}, {"prompt": [], "max_tokens": 1}])
def test_other_prompts_than_token_ids_are_refused(client: TestClient, body: dict[str, object]) -> None:
    assert client.post("/v1/completions", json=body).status_code == 422
