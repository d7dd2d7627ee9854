"""LLM over random:tiny, compared with HTTP."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.client.answers import Chunk
from shortfin_apps.llm.client.errors import ServerError
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.contract.errors import ArtifactError, InvalidRequestError, UnavailableError
from shortfin_apps.llm.offline.llm import LLM, chunks_of
from shortfin_apps.llm.serving.http.streaming import KEEP_ALIVE
from shortfin_apps.llm.serving.server.config import ServerConfigError
from tests.integration.served_tiny import serving
from tests.scripted_server import DONE, completion_event, event


def test_a_piece_of_several_events_is_several_chunks() -> None:
    piece = completion_event("a") + completion_event("") + completion_event("b", "stop") + DONE
    assert list(chunks_of(piece)) == [Chunk("a"), Chunk("b", "stop")]


def test_comments_are_skipped() -> None:
    """As `SHORTFIN_LLM_STREAM_KEEP_ALIVE` has them sent."""
    piece = KEEP_ALIVE + completion_event("a", "stop") + KEEP_ALIVE + DONE
    assert list(chunks_of(piece)) == [Chunk("a", "stop")]


def test_an_error_in_the_stream_is_raised_after_what_came_before() -> None:
    chunks = chunks_of(
        completion_event("a") + event({"error": {"message": "no", "type": "service_unavailable_error"}})
    )
    assert next(chunks) == Chunk("a")
    with pytest.raises(UnavailableError, match="no"):
        next(chunks)


PROMPTS: list[Any] = ["One, two,", [1, 2, 3], "Red, green,", "é" * 40]
CHATS = [[{"role": "user", "content": text}] for text in ("hi", "what is it?")]
SAMPLING: dict[str, Any] = {"max_tokens": 9, "seed": 7, "temperature": 0.8}


@pytest.fixture(scope="module")
def llm(tiny_artifact: Artifact) -> Iterator[LLM]:
    with LLM(tiny_artifact.vmfb.parent, token_budget=320, max_running=3, max_queue=2) as llm:
        yield llm


def stats(llm: LLM) -> EngineStats:
    return llm._model._loaded.engine.stats()


async def served(artifact: Artifact, path: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async with serving(artifact, token_budget=320) as (client, _):
        return [(await client.post(path, json=body)).json() for body in bodies]


async def test_a_prompt_has_the_tokens_that_http_gives_it(llm: LLM, tiny_artifact: Artifact) -> None:
    bodies = [{"prompt": prompt, "return_token_ids": True, "logprobs": 2, **SAMPLING} for prompt in PROMPTS]
    over_http = await served(tiny_artifact, "/v1/completions", bodies)
    for answer, body in zip(llm.generate(PROMPTS, logprobs=2, **SAMPLING), over_http, strict=True):
        [choice] = body["choices"]
        assert answer.token_ids == tuple(choice["token_ids"])
        assert (answer.text, answer.finish_reason) == (choice["text"], choice["finish_reason"])
        assert answer.usage.prompt_tokens == body["usage"]["prompt_tokens"]
        assert [each.token for each in answer.logprobs or ()] == choice["logprobs"]["tokens"]


async def test_a_conversation_has_the_answer_that_http_gives_it(llm: LLM, tiny_artifact: Artifact) -> None:
    bodies = [{"messages": messages, "return_token_ids": True, **SAMPLING} for messages in CHATS]
    over_http = await served(tiny_artifact, "/v1/chat/completions", bodies)
    answers = llm.chat(CHATS, **SAMPLING)
    assert [answer.text for answer in answers] == [
        body["choices"][0]["message"]["content"] for body in over_http
    ]
    [alone] = llm.chat(CHATS[0], **SAMPLING)
    assert alone.token_ids == answers[0].token_ids


def test_defaults_are_those_of_the_routes(llm: LLM) -> None:
    assert llm.generate("x", ignore_eos=True, temperature=0)[0].usage.completion_tokens == 16


def test_far_more_prompts_than_places_are_answered_in_order(llm: LLM) -> None:
    prompts = [[number % 200 + 1, number // 200 + 1] for number in range(300)]
    answers = llm.generate(prompts, max_tokens=2, temperature=0, ignore_eos=True)
    assert [answer.usage.prompt_tokens for answer in answers] == [2] * 300
    assert answers[17] == llm.generate(prompts[17], max_tokens=2, temperature=0, ignore_eos=True)[0]


def test_prompts_wait_for_room_in_a_queue_of_few_tokens(tiny_artifact: Artifact) -> None:
    with LLM(tiny_artifact.vmfb.parent, token_budget=320, max_queue_tokens=40) as llm:
        assert len(llm.generate(["x" * 30] * 40, max_tokens=2)) == 40


def test_no_prompts_have_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == llm.chat([]) == []


def test_repeated_prompts_are_cached(llm: LLM) -> None:
    prompt = "cached " * 20
    llm.generate(prompt, max_tokens=1)
    assert llm.generate(prompt, max_tokens=1)[0].usage.cached_tokens > 0


def test_the_first_failure_is_raised_with_its_place(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="`prompt` must hold at least one token") as raised:
        llm.generate(["a", "", "b"], max_tokens=2)
    assert raised.value.__notes__ == ["in answer to number 1, counted from 0"]
    llm.generate("z", max_tokens=1)  # behind the aborts of the others
    assert stats(llm).pages.leased == 0


def test_failures_can_take_the_place_of_answers(llm: LLM) -> None:
    prompt: Any = [object()]
    a, empty, odd, b = llm.generate(["a\ud800", "", prompt, "b"], max_tokens=2, keep_going=True)
    assert a.error is b.error is None
    assert isinstance(empty.error, InvalidRequestError)
    assert isinstance(odd.error, InvalidRequestError)


def test_a_wrong_parameter_names_itself(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="`temperature`"):
        llm.generate("a", temperature=-1)
    with pytest.raises(InvalidRequestError, match="there is no parameter `n`"):
        llm.generate("a", n=2)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequestError, match="there is no parameter `tools`"):
        llm.stream("a", tools=[])  # type: ignore[call-arg]


def test_a_stream_has_the_pieces_of_the_answer(llm: LLM) -> None:
    [whole] = llm.generate("a", **SAMPLING)
    chunks = list(llm.stream("a", **SAMPLING))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert len(chunks) > 2
    assert chunks[-1].usage == whole.usage
    [answer] = llm.chat(CHATS[0], **SAMPLING)
    assert "".join(chunk.text for chunk in llm.stream_chat(CHATS[0], **SAMPLING)) == answer.text


def test_a_stream_that_is_left_is_aborted(llm: LLM) -> None:
    chunks = llm.stream("a", max_tokens=900, ignore_eos=True)
    assert next(chunks).token_ids
    del chunks
    gc.collect()
    llm.generate(["b"] * 5, max_tokens=1)  # which needs every place
    assert stats(llm).pages.leased == 0


def test_an_error_of_a_stream_is_raised_from_it(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="`prompt` must hold at least one token"):
        next(llm.stream(""))


def test_threads_share_a_model(llm: LLM) -> None:
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        answers[number] = llm.generate([[number + 1]] * 5, max_tokens=3, temperature=0)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        [alone] = llm.generate([[number + 1]], max_tokens=3, temperature=0)
        assert [answer.token_ids for answer in answers[number]] == [alone.token_ids] * 5


async def test_it_works_in_a_running_loop(llm: LLM) -> None:
    first, second = await asyncio.gather(
        *(asyncio.to_thread(llm.generate, text, max_tokens=2, temperature=0) for text in "ab")
    )
    assert [first, second] == [llm.generate(text, max_tokens=2, temperature=0) for text in "ab"]


def test_functions_can_be_called(llm: LLM) -> None:
    """random:tiny has no dialect of calls, which is refused as over HTTP."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with pytest.raises(InvalidRequestError, match="tool"):
        llm.chat(CHATS[0], tools=[tool])


def test_answers_fit_a_schema(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    [answer] = llm.chat(CHATS[0], response_format=wanted, max_tokens=200, temperature=0)
    assert json.loads(answer.text) == {"a": 1}


def test_closing_ends_what_runs_and_every_thread(tiny_artifact: Artifact) -> None:
    before = set(threading.enumerate())
    llm = LLM(tiny_artifact.vmfb.parent, token_budget=320)
    streams = [llm.stream("a", max_tokens=900, ignore_eos=True) for _ in range(3)]
    for stream in streams:
        next(stream)
    llm.close()
    llm.close()
    for stream in streams:
        with pytest.raises((UnavailableError, ServerError)):
            list(stream)
    with pytest.raises(UnavailableError, match="the model is closed"):
        llm.generate("a")
    assert set(threading.enumerate()) <= before


def test_a_model_that_nobody_closes_is_closed_when_it_is_collected(tiny_artifact: Artifact) -> None:
    before = set(threading.enumerate())
    llm = LLM(tiny_artifact.vmfb.parent, token_budget=320)
    assert set(threading.enumerate()) - before
    del llm
    gc.collect()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    "code",
    [
        "chunks = llm.stream('a', max_tokens=900, ignore_eos=True); next(chunks)",
        "llm.generate('a', max_tokens=1); llm.close()",
    ],
)
def test_a_program_ends_whether_or_not_it_closes_the_model(tiny_artifact: Artifact, code: str) -> None:
    model = str(tiny_artifact.vmfb.parent)
    load = f"from shortfin_apps.llm.offline import LLM\nllm = LLM({model!r}, token_budget=320)\n"
    assert outcome(load + code) == (0, "", "")


def outcome(program: str) -> tuple[int, str, str]:
    """Its status, and what it prints on stdout and stderr."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_ctrl_c_aborts_what_was_asked_for(tiny_artifact: Artifact) -> None:
    program = f"""
import signal, threading
from shortfin_apps.llm.offline import LLM
signal.signal(signal.SIGINT, signal.default_int_handler)
with LLM({str(tiny_artifact.vmfb.parent)!r}, token_budget=320) as llm:
    engine = llm._model._loaded.engine
    def press():
        while not engine.stats().num_running:
            pass
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    threading.Thread(target=press).start()
    try:
        llm.generate(["a"] * 1000, max_tokens=900, ignore_eos=True)
    except KeyboardInterrupt:
        print("interrupted")
    print(len(llm.generate(["b"] * 10, max_tokens=1)), engine.stats().pages.leased)
print([thread.name for thread in threading.enumerate()])
"""
    assert outcome(program) == (0, "interrupted\n10 0\n['MainThread']\n", "")


def test_what_cannot_be_loaded_says_why(tiny_artifact: Artifact, tmp_path: Any) -> None:
    with pytest.raises(ArtifactError):
        LLM(tmp_path)
    with pytest.raises(ServerConfigError, match="`port` is a setting for `serve` alone"):
        LLM(tiny_artifact.vmfb.parent, port=1)


def test_a_source_is_built_first() -> None:
    with LLM("random:tiny", token_budget=320, served_model_name="mine") as llm:
        assert llm.name == "mine"
        assert len(llm.generate("a", max_tokens=1)) == 1


def test_importing_the_package_imports_no_libraries() -> None:
    code = "import sys, shortfin_apps.llm; print(*{'fastapi', 'numpy', 'asyncio'} & sys.modules.keys())"
    assert outcome(code) == (0, "\n", "")


def test_answers_can_be_kept(llm: LLM) -> None:
    answers = llm.generate(["a", "b"], max_tokens=2, logprobs=1)
    assert pickle.loads(pickle.dumps(answers)) == answers
