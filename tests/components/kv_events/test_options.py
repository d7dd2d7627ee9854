from __future__ import annotations

import pytest

from shortfin_apps.llm.components.kv_events.options import KVEventSettings


@pytest.mark.parametrize(
    ("endpoint", "is_local"),
    [
        ("ipc:///run/kv", True),
        ("tcp://127.0.0.1:5557", True),
        ("tcp://127.3.0.1:*", True),
        ("tcp://localhost:5557", True),
        ("tcp://[::1]:5557", True),
        ("tcp://*:5557", False),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://[::]:5557", False),
        ("tcp://10.0.0.1:5557", False),
        ("tcp://localhost.example.org:5557", False),
    ],
)
def test_endpoints_that_others_can_reach_are_known(endpoint: str, is_local: bool) -> None:
    assert KVEventSettings(kv_events_endpoint=endpoint).is_local == is_local
    both = KVEventSettings(kv_events_endpoint="ipc:///run/kv", kv_events_replay_endpoint=endpoint)
    assert both.is_local == is_local
