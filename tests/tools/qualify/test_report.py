"""What a report says, and what it must not say."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.tools.qualify.bench import Plan
from shortfin_apps.llm.tools.qualify.checks import CHECKS
from shortfin_apps.llm.tools.qualify.outcome import Fault, Outcome, Status
from shortfin_apps.llm.tools.qualify.page import page, verdict
from shortfin_apps.llm.tools.qualify.report import Private, document, write

ENTRY = {
    "entry": "decode_bs1",
    "rows": 1,
    "new_tokens": 1,
    "context": 256,
    "time_s_median": 2e-3,
    "floor_s": 1e-3,
    "ratio": 2.0,
}
OUTCOMES = [
    Outcome(
        "machine", Status.PASSED, "gfx1151", 0.1, None, {"cpu": {"model": "a CPU"}, "amd": {"cards": []}}
    ),
    Outcome(
        "self-test", Status.FAILED, "`x` <b>differs</b>", 1.25, Fault.WRONG_KERNEL, {"errors": {"x": 3.0}}
    ),
    Outcome("weights", Status.FAILED, "ended the process", 1.0, None, {"log": "File <x>\nFile y"}),
    Outcome("tokens", Status.SKIPPED, "this is the CPU", 0.0),
    Outcome("roofline", Status.PASSED, "1 entry", 1.0, None, {"entries": [ENTRY]}),
]


def made(outcomes: list[Outcome] = OUTCOMES) -> dict[str, Any]:
    return document(Plan("random:tiny", "hip:gfx1151"), CHECKS, outcomes)


def test_the_verdict_names_the_faults() -> None:
    assert verdict(made()) == "failed: 2 of 5 checks: wrong kernel result (2 passed, 1 skipped)"
    assert verdict(made([OUTCOMES[0], OUTCOMES[3]])) == "passed: 1 passed, 1 skipped"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [name for name, _ in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_loads_nothing_and_shows_texts_as_they_are() -> None:
    text = page(made())
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.links == []
    assert "script" not in tags.seen
    assert "url(" not in text
    assert "`x` &lt;b&gt;differs&lt;/b&gt;" in text
    assert "decode_bs1" in text
    assert "a CPU" in text
    assert "<details open><summary>weights: fail</summary><pre>File &lt;x&gt;\nFile y</pre>" in text


def test_files_are_written_and_a_bad_folder_is_refused(tmp_path: Path) -> None:
    doc = made()
    paths = write(doc, tmp_path / "a" / "b")
    assert json.loads(paths[0].read_text()) == doc
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError, match="cannot write"):
        write(doc, tmp_path / "file")


def test_private_names_are_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setenv("SHORTFIN_LLM_API_KEY", "sk-123456")
    monkeypatch.setattr("socket.gethostname", lambda: "tower.lan")
    monkeypatch.chdir(tmp_path)
    text = f"/home/ada/.cache/x, adapter, ada on tower (tower.lan), {tmp_path}/m, sk-123456"
    found = Private.of_this_process().removed_from({"ada": [text, 1, None, {"x": ("ada",)}]})
    assert found == {
        "ada": ["~/.cache/x, adapter, USER on HOST (HOST), ./m, SECRET", 1, None, {"x": ["USER"]}]
    }


@pytest.mark.parametrize("user", ["machine", "checks", "passed", "status", "cpu", "entries", "amd"])
def test_names_of_the_report_are_not_private(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = made()
    monkeypatch.setenv("LOGNAME", user)
    monkeypatch.setenv("DB_PASS", "self-test")
    monkeypatch.setenv("BASIC_AUTH", "skipped")
    monkeypatch.setenv("A_CREDENTIAL", "wrong kernel result")
    doc = made()
    assert {**doc, "finished": ""} == {**right, "finished": ""}
    assert page(doc)


def test_folders_are_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    subject, cache, out = (tmp_path / name for name in ("ada/smollm2", "caches/ada", "ada/report"))
    subject.mkdir(parents=True)
    (tmp_path / "link").symlink_to(subject)
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", str(cache))
    folders = [subject / "x.vmfb", tmp_path / "link/x", cache / "y", out / "z", Path(sys.prefix) / "lib"]
    text = " ".join(map(str, folders))
    outcome = Outcome("files", Status.FAILED, text, 0.1, None, {"log": text})
    doc = document(Plan(str(tmp_path / "link"), "cpu"), CHECKS, [outcome], [(out, "OUT")])
    plain = "smollm2/x.vmfb smollm2/x CACHE/y OUT/z PREFIX/lib"
    assert (doc["checks"][0]["text"], doc["checks"][0]["figures"]) == (plain, {"log": plain})
    assert doc["subject"] == "smollm2"


@pytest.mark.parametrize("name", ["DB_PASS", "HTTP_AUTH", "MY_CREDENTIAL"])
def test_variables_that_hold_secrets_are_known_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "hunter22")
    assert Private.of_this_process().removed_from("with hunter22") == "with SECRET"


def test_an_artefact_is_named_without_its_folder(tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    doc = document(Plan(str(tmp_path / "smollm2"), "cpu"), CHECKS, OUTCOMES)
    assert doc["subject"] == "smollm2"
