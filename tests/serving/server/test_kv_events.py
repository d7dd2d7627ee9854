from __future__ import annotations

import pytest

from shortfin_apps.llm.components.kv_events.options import KVEventOptions
from shortfin_apps.llm.serving.server.kv_events import kv_event_options
from tests.serving.server.settings import parse


def test_kv_events_have_a_topic_by_which_llm_d_finds_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert kv_event_options(parse("DIR"), "tiny") is None
    flags = ("--kv-events-endpoint", "tcp://*:5557", "--kv-events-replay-endpoint", "tcp://*:5558")
    address = ("--host", "10.0.0.1", "--port", "8001")
    options = kv_event_options(parse("DIR", *flags, *address), "org/tiny")
    assert options == KVEventOptions(
        endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558", topic="kv@10.0.0.1:8001@org/tiny"
    )
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # as vLLM's hashes depend on it
    options = kv_event_options(parse("DIR", *flags, "--kv-events-topic", "t"), "tiny")
    assert options is not None
    assert (options.topic, options.hash_seed) == ("t", "0")


@pytest.mark.parametrize(("endpoint", "warns"), [("tcp://*:5557", True), ("tcp://127.0.0.1:5557", False)])
def test_whoever_can_be_reached_by_others_is_warned(
    endpoint: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kv_event_options(parse("DIR", "--kv-events-endpoint", endpoint), "tiny")
    assert ("anyone who can reach" in caplog.text) == warns
