from __future__ import annotations

import sys

import pytest

from shortfin_apps.llm.serving.server.banner import announce


def test_a_standard_output_without_a_reader_does_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Broken())
    announce("m", "http://127.0.0.1:1", has_chat=True, logs_json=False)
