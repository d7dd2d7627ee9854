from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.client.errors import AuthenticationError
from shortfin_apps.llm.contract.errors import LlmError, OverloadedError, UnavailableError
from shortfin_apps.llm.offline.batch.output import BatchOutput, ResultFile
from shortfin_apps.llm.offline.batch.requests import BatchFileError, BatchRequest
from shortfin_apps.llm.offline.batch.run import LocalSender, Tally, run_batch, tally_of
from shortfin_apps.llm.offline.local_model import Answered
from tests.offline.batch.batches import answered, ids_in, opened, results_in

PATH = "/v1/completions"
REQUEST = BatchRequest("a", PATH, b'{"prompt":  "a"}', 1)


class Model:
    """What LocalSender sees of a model."""

    def __init__(self, status: int, healthy: bool) -> None:
        self.healthy = healthy
        self._answered = Answered(status, b"{}", None)

    async def post(self, path: str, body: bytes, num_sequences: int) -> Answered:
        assert (path, body, num_sequences) == (REQUEST.url, REQUEST.body, 1)
        return self._answered


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (500, True), (400, False)])
async def test_a_local_answer_is_passed_on(status: int, healthy: bool) -> None:
    answered = await LocalSender(Model(status, healthy)).send(REQUEST)  # type: ignore[arg-type]
    assert answered.status == status


async def test_a_dead_device_is_no_answer_to_the_line() -> None:
    with pytest.raises(UnavailableError, match="the device does not work any more"):
        await LocalSender(Model(500, False)).send(REQUEST)  # type: ignore[arg-type]


class ScriptedSender:
    """Answers with `answer`, in another turn of the loop; `sent` are the ids in order."""

    def __init__(self, answer: Callable[[str], Answered] = lambda _: answered()) -> None:
        self.sent: list[str] = []
        self.num_open = self.most_open = 0
        self._answer = answer

    async def send(self, request: BatchRequest) -> Answered:
        self.sent.append(request.custom_id)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(0)
            return self._answer(request.custom_id)
        finally:
            self.num_open -= 1


async def run(folder: Path, ids: list[str], sender: ScriptedSender, concurrency: int = 4) -> Tally:
    with (
        closing(opened(folder / "in.jsonl", ids)) as batch,
        closing(BatchOutput.open(folder / "out.jsonl", None, batch, restart=False)) as output,
    ):
        tally = tally_of(batch, output)
        await run_batch(batch, output, sender, concurrency, tally, lambda tokens: None)
    return tally


IDS = [str(number) for number in range(50)]


async def test_every_line_is_sent_once_and_no_more_than_allowed_at_once(tmp_path: Path) -> None:
    sender = ScriptedSender()
    tally = await run(tmp_path, IDS, sender)
    assert sender.sent == IDS
    assert sender.most_open == 4
    assert sorted(ids_in(tmp_path / "out.jsonl")) == sorted(IDS)
    assert (tally.num_done, tally.num_failed, tally.completion_tokens) == (50, 0, 100)


async def test_a_batch_without_lines_is_done(tmp_path: Path) -> None:
    assert (await run(tmp_path, [], ScriptedSender())).num_done == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""


async def test_a_complete_batch_sends_nothing(tmp_path: Path) -> None:
    await run(tmp_path, IDS, ScriptedSender(lambda custom_id: answered(400 if custom_id == "7" else 200)))
    sender = ScriptedSender()
    tally = await run(tmp_path, IDS, sender)
    assert sender.sent == []
    assert (tally.num_before, tally.num_done, tally.num_failed) == (50, 50, 1)


async def test_a_line_that_fails_has_its_answer_and_ends_no_other(tmp_path: Path) -> None:
    bad = answered(400, b'{"error": {"message": "no"}}')
    tally = await run(
        tmp_path, ["a", "b"], ScriptedSender(lambda custom_id: bad if custom_id == "a" else answered())
    )
    assert tally.num_failed == 1
    statuses = {
        each["custom_id"]: each["response"]["status_code"] for each in results_in(tmp_path / "out.jsonl")
    }
    assert statuses == {"a": 400, "b": 200}


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, AuthenticationError),
        (403, AuthenticationError),
        (429, OverloadedError),
        (503, UnavailableError),
        (502, LlmError),
    ],
)
async def test_what_says_nothing_about_the_line_stops_the_batch(
    tmp_path: Path, status: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await run(
            tmp_path, IDS, ScriptedSender(lambda custom_id: answered(status if custom_id == "9" else 200))
        )
    done = ids_in(tmp_path / "out.jsonl")
    assert "9" not in done
    sender = ScriptedSender()
    await run(tmp_path, IDS, sender)
    assert sorted([*done, *sender.sent]) == sorted(IDS)


async def test_a_full_disk_stops_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ResultFile, "append", lambda *_: (_ for _ in ()).throw(BatchFileError("No space left")))
        with pytest.raises(BatchFileError, match="No space left"):
            await run(tmp_path, IDS, ScriptedSender())
    await run(tmp_path, IDS, ScriptedSender())
    assert sorted(ids_in(tmp_path / "out.jsonl")) == sorted(IDS)


async def test_a_cancelled_run_keeps_what_was_answered(tmp_path: Path) -> None:
    def answer(custom_id: str) -> Answered:
        if custom_id == "20":
            running.cancel()
        return answered()

    running = asyncio.ensure_future(run(tmp_path, IDS, ScriptedSender(answer)))
    with pytest.raises(asyncio.CancelledError):
        await running
    done = ids_in(tmp_path / "out.jsonl")
    assert 0 < len(done) < len(IDS)
    sender = ScriptedSender()
    await run(tmp_path, IDS, sender)
    assert sorted([*done, *sender.sent]) == sorted(IDS)


@given(data=st.data())
def test_runs_that_crash_anywhere_answer_each_line_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Runs end with an error, and then their output is cut at any byte that this run has written."""
    folder = tmp_path_factory.mktemp("run")
    out, ids = folder / "out.jsonl", IDS[: data.draw(st.integers(1, 12))]
    kept = 0
    for crash in data.draw(st.lists(st.sampled_from(ids), max_size=4)):

        def answer(custom_id: str, crash: str = crash) -> Answered:
            return answered(503 if custom_id == crash else 200)

        with suppress(UnavailableError):
            asyncio.run(run(folder, ids, ScriptedSender(answer), data.draw(st.integers(1, 5))))
        content = out.read_bytes()
        kept = data.draw(st.integers(min(kept, len(content)), len(content)))
        out.write_bytes(content[:kept])
        kept = content[:kept].rfind(b"\n") + 1
    asyncio.run(run(folder, ids, ScriptedSender()))
    assert sorted(ids_in(out)) == sorted(ids)
