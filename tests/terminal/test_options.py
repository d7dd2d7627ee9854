from __future__ import annotations

import argparse

import pytest

from shortfin_apps.llm.terminal.options import API_KEY_VARIABLE, add_server_options


@pytest.mark.parametrize(
    ("value", "sent"), [("k1", "k1"), ("k1,k2", "k1"), (" k1 , k2", "k1"), ("", None), (",", None)]
)
def test_the_first_of_several_keys_is_sent(
    monkeypatch: pytest.MonkeyPatch, value: str, sent: str | None
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, value)
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    assert parser.parse_args([]).api_key == sent
