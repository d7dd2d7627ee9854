from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.offline.batch.requests import (
    BatchFileError,
    BatchInput,
    local_url,
    num_sequences,
    server_url,
)
from tests.offline.batch.batches import line, opened, write

LOCAL = local_url(("/v1/completions", "/v1/chat/completions"))


def open_bytes(tmp_path: Path, content: bytes) -> BatchInput:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    return BatchInput.open(path, LOCAL)


def test_bodies_are_kept_byte_by_byte(tmp_path: Path) -> None:
    raw = rb'{"prompt" : "\u00e9", "seed":123456789012345678901234567890, "temperature": 1.10}'
    content = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":' + raw + b"}\n"
    batch = open_bytes(tmp_path, content)
    assert batch.request(batch.lines[0]).body == raw
    batch.close()


def test_lone_surrogates_in_a_line_refuse_no_batch(tmp_path: Path) -> None:
    body = rb'{"prompt": "a\ud83d", "n": 3}'
    content = b'{"custom_id":"\\ude00","method":"POST","url":"/v1/completions","body":' + body + b"}\n"
    batch = open_bytes(tmp_path, content)
    request = batch.request(batch.lines[0])
    assert (request.custom_id, request.num_sequences) == ("\ufffd", 3)
    assert json.loads(request.body)["prompt"] == "a\ufffd"
    batch.close()


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_ends_blank_lines_and_the_mark_of_windows_change_nothing(
    tmp_path: Path, end: bytes, mark: bytes
) -> None:
    texts = [line("a").encode(), b"", b"   ", line("b").encode()]
    batch = open_bytes(tmp_path, mark + end.join(texts))  # and no end of the last line
    assert [each.number for each in batch.lines] == [1, 4]
    requests = [batch.request(each) for each in batch.lines]
    assert [json.loads(each.body)["prompt"] for each in requests] == ["a", "b"]
    batch.close()


@given(ids=st.lists(st.text(min_size=1), unique=True, max_size=20))
def test_every_line_is_found_again(tmp_path_factory: pytest.TempPathFactory, ids: list[str]) -> None:
    batch = opened(tmp_path_factory.mktemp("batch") / "in.jsonl", ids)
    assert [batch.request(each).custom_id for each in batch.lines] == ids
    batch.close()


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    batch = open_bytes(tmp_path, b"")
    assert batch.lines == []
    batch.close()


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("{", r"it is not JSON \(Input data was truncated\)"),
        ("[]", "Expected `object`, got `array`"),
        ('{"method": "POST"}', "Object missing required field `custom_id`"),
        (line(""), r"Expected `str` of length >= 1 - at `\$.custom_id`"),
        (line("a"), "`custom_id` 'a' is that of line 1"),
        (line("b").replace("POST", "GET"), "`method` is 'GET', but must be POST"),
        (line("b", "/v1/embeddings"), "`url` is '/v1/embeddings', but must be /v1/completions or /v1/chat"),
        (line("b", stream=True), "`stream` is set, but a batch has whole answers; leave it out"),
        (line("b")[:-1] + ', "priority": 1}', "unknown field `priority`"),
        ('{"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": []}', "Expected `object`"),
        (line("b").replace('"b"', "[" * 100_000 + "]" * 100_000), "Expected `str`"),
        (line("b", x=0).replace('"x": 0', '"x": ' + "[" * 100_000 + "]" * 100_000), "it is not JSON"),
    ],
)
def test_a_bad_line_is_reported_with_its_number(tmp_path: Path, bad: str, problem: str) -> None:
    with pytest.raises(BatchFileError, match=rf"has 1 line that cannot be sent.*\n  line 2: .*{problem}"):
        open_bytes(tmp_path, f"{line('a')}\n{bad}\n{line('c')}\n".encode())


def test_text_that_is_not_utf8_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="line 1: it is not JSON"):
        open_bytes(tmp_path, line("name").encode().replace(b"name", b"name\xe9"))


def test_all_bad_lines_are_reported_at_once_up_to_a_bound(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError) as raised:
        open_bytes(tmp_path, b"nonsense\n" * 1_000)
    assert "has 1,000 lines" in str(raised.value)
    assert len(re.findall("  line ", str(raised.value))) == 20
    assert str(raised.value).endswith("and 980 more")


def test_a_file_that_is_not_there_or_no_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"cannot read .*No such file"):
        BatchInput.open(tmp_path / "none", LOCAL)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(BatchFileError, match="is not a regular file"):
            BatchInput.open(path, LOCAL)


@pytest.mark.parametrize("changed", [line("b"), "nonsense", ""])
def test_a_line_that_changes_while_the_batch_runs_is_noticed(tmp_path: Path, changed: str) -> None:
    batch = opened(tmp_path / "in.jsonl", ["a"])
    write(batch.path, [changed])
    with pytest.raises(BatchFileError, match=r"line 1 of .* has changed while the batch runs"):
        batch.request(batch.lines[0])
    batch.close()


@pytest.mark.parametrize("url", ["/v1/completions", "/generate", "/v1/embeddings"])
def test_a_server_takes_any_path(url: str) -> None:
    assert server_url(url) is None


@pytest.mark.parametrize("url", ["", "v1", "http://evil", "//evil/v1", "/a b", "/a\n"])
def test_no_line_reaches_another_server(url: str) -> None:
    assert server_url(url) is not None


@pytest.mark.parametrize(
    ("body", "places"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [[1, 2], [3]], "n": 2}, 4),
        ({"prompt": "a", "n": 2, "best_of": 5}, 5),
        ({"prompt": "a", "prompt_logprobs": 1}, 2),
        ({"prompt": ["a", "b"], "echo": True, "logprobs": 0, "n": 3}, 8),
        ({"messages": [], "n": 3}, 3),
        ({"prompt": "a", "n": "many"}, 1),
        ({"prompt": "a", "n": -1}, 1),
        ([], 1),
    ],
)
def test_a_request_takes_a_place_for_each_sequence(body: object, places: int) -> None:
    assert num_sequences(json.dumps(body).encode()) == places


@pytest.mark.parametrize("body", [b'{"prompt": "\xff", "n": 3}', b'{"prompt": ' + b"[" * 9_999])
def test_what_will_be_refused_takes_one_place(body: bytes) -> None:
    assert num_sequences(body) == 1
