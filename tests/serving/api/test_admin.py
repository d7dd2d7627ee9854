from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from shortfin_apps.llm.serving.api import admin
from shortfin_apps.llm.serving.http.auth import KeyRing
from tests.serving.api.harness import TOKENIZER, Harness
from tests.serving.api.scripted_engine import forever

ROOT, USER = {"authorization": "Bearer root"}, {"authorization": "Bearer user"}
ROUTES = [
    *(("/flush_cache", None), ("/abort_all", None), ("/debug/dump", None)),
    ("/log_level", {"level": "info"}),
]


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    level = logger.level
    yield logger
    logger.setLevel(level)


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    ("keys", "headers"),
    [
        (KeyRing(["user"], ["root"]), USER),
        (KeyRing(["user"]), USER),
        (KeyRing(), {}),
        (KeyRing([], ["root"]), {}),
        (KeyRing([], ["root"]), USER),
    ],
)
async def test_admin_routes_need_an_admin_key(
    path: str, body: object, keys: KeyRing, headers: dict[str, str]
) -> None:
    harness = Harness(keys=keys)
    response = await harness.client.post(path, json=body, headers=headers)
    assert response.status_code == 403
    assert "--admin-api-key" in response.json()["error"]["message"]
    assert harness.engine.flushes == 0
    assert not harness.engine.dumps


async def test_debug_dump_tells_the_file_or_answers_with_it(tmp_path: Path) -> None:
    harness = Harness(keys=KeyRing([], ["root"]))
    harness.engine.dump_path = tmp_path / "dump.jsonl.gz"
    harness.engine.dump_path.write_bytes(b"content")
    told = await harness.client.post("/debug/dump", headers=ROOT)
    assert told.json() == {"file": str(tmp_path / "dump.jsonl.gz"), "bytes": 7}
    sent = await harness.client.post("/debug/dump?download=true", headers=ROOT)
    assert (sent.content, sent.headers["content-type"]) == (b"content", "application/gzip")
    assert "dump.jsonl.gz" in sent.headers["content-disposition"]
    assert harness.engine.dumps == ["POST /debug/dump"] * 2


async def test_a_dump_that_is_deleted_while_it_is_sent_is_sent_whole(tmp_path: Path) -> None:
    path, content = tmp_path / "dump.jsonl.gz", bytes(range(256)) * 5000
    path.write_bytes(content)
    answer = admin._sent(path)
    path.unlink()
    assert answer.headers["content-length"] == str(len(content))
    pieces = [piece async for piece in answer.body_iterator]
    assert b"".join(piece for piece in pieces if isinstance(piece, bytes)) == content


async def test_a_dump_that_is_deleted_before_it_is_sent_is_an_error(tmp_path: Path) -> None:
    harness = Harness(keys=KeyRing([], ["root"]))
    harness.engine.dump_path = tmp_path / "dump.jsonl.gz"
    harness.engine.dump_path.write_bytes(b"content")
    harness.engine.removes_dumps = True
    gone = await harness.client.post("/debug/dump?download=true", headers=ROOT)
    assert gone.status_code == 503
    assert "ask again" in gone.json()["error"]["message"]


async def test_debug_dump_says_why_there_is_none() -> None:
    harness = Harness(keys=KeyRing([], ["root"]))
    response = await harness.client.post("/debug/dump", headers=ROOT)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "no space is left"


async def test_flush_cache() -> None:
    harness = Harness(keys=KeyRing([], ["root"]))
    assert (await harness.client.post("/flush_cache", headers=ROOT)).json() == {"status": "flushed"}
    assert harness.engine.flushes == 1


async def test_abort_all_ends_running_requests_only() -> None:
    harness = Harness(forever(TOKENIZER, "the "), keys=KeyRing([], ["root"]))
    harness.engine.gate.clear()
    body = {"text": ["a", "b"], "sampling_params": {"max_tokens": 99}}
    running = asyncio.create_task(harness.post("/generate", body))
    await harness.engine.waiting.wait()
    assert (await harness.client.post("/abort_all", headers=ROOT)).json() == {"aborted": 2}
    harness.engine.gate.set()
    answers = (await running).json()["responses"]
    reasons = [a["responses"][0]["meta_info"]["finish_reason"]["type"] for a in answers]
    assert reasons == ["abort", "abort"]
    assert (await harness.post("/generate", {"text": "a"})).status_code == 200


async def test_log_level(root_logger: logging.Logger) -> None:
    harness = Harness(keys=KeyRing([], ["root"]))
    response = await harness.client.post("/log_level", json={"level": "error"}, headers=ROOT)
    assert response.json() == {"level": "error"}
    assert root_logger.level == logging.ERROR
    response = await harness.client.post("/log_level", json={"level": "loud"}, headers=ROOT)
    assert response.status_code == 400


async def test_a_dump_is_documented_in_both_forms() -> None:
    paths = (await Harness().client.get("/openapi.json")).json()["paths"]
    assert set(paths["/debug/dump"]["post"]["responses"]["200"]["content"]) == {
        "application/json",
        "application/gzip",
    }
