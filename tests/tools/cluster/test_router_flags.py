from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from shortfin_apps.llm.serving.server.config import ServerConfigError
from shortfin_apps.llm.tools.cluster.router_flags import (
    PACKAGES,
    ROUTER_NAMES,
    ClusterOptions,
    Keys,
    RouterName,
    check_installed,
    dangers,
    router_flags,
)
from tests.serving.server.settings import parse

KEYS = Keys(public=("alice", "bob"), admin=("root",), worker="w", control="c")
OPEN = Keys(public=(), admin=(), worker="w", control="c")


def flags_of(*argv: str, keys: Keys = OPEN, **options: Any) -> list[str]:
    return router_flags(parse("m", *argv), ClusterOptions(**options), keys, 8000, [5001, 5002])


def values_of(flags: list[str], name: str) -> list[str]:
    """The words behind each `name`, up to the next flag."""
    found, taking = [], False
    for word in flags:
        if word.startswith("--"):
            taking = word == name
        elif taking:
            found.append(word)
    return found


@pytest.mark.parametrize("router", ROUTER_NAMES)
def test_everything_listens_on_loopback_unless_told(router: RouterName) -> None:
    flags = flags_of(router=router)
    assert values_of(flags, "--host") == values_of(flags, "--prometheus-host") == ["127.0.0.1"]
    assert values_of(flags, "--worker-urls") == ["http://127.0.0.1:5001", "http://127.0.0.1:5002"]
    opened = flags_of("--host", "0.0.0.0", router=router)
    assert values_of(opened, "--host") == ["0.0.0.0"]
    assert values_of(opened, "--prometheus-host") == ["127.0.0.1"]


def test_the_control_plane_of_smg_has_a_key_always() -> None:
    assert values_of(flags_of(), "--control-plane-api-keys") == ["cluster:cluster:admin:c"]
    assert values_of(flags_of(), "--api-key") == []


def test_keys_are_the_routers_and_the_workers() -> None:
    flags = flags_of(keys=KEYS)
    assert values_of(flags, "--tenant-api-key") == ["key-0:alice", "key-1:bob", "key-2:root"]
    assert values_of(flags, "--api-key") == ["w"]
    assert values_of(flags, "--control-plane-api-keys")[1:] == ["admin-0:admin-0:admin:root"]
    assert KEYS.of_workers == ("alice", "bob", "w")


def test_workers_without_public_keys_take_any() -> None:
    assert OPEN.of_workers == ()


def test_router_flags_come_last_so_that_they_win() -> None:
    flags = flags_of(router_flags=("--policy", "random"))
    assert values_of(flags, "--policy") == ["cache_aware", "random"]


def test_settings_of_the_address_are_the_routers() -> None:
    flags = flags_of("--ssl-certfile", "c.pem", "--cors-origin", "*", "--max-body-bytes", "99")
    assert values_of(flags, "--tls-cert-path") == values_of(flags, "--tls-key-path") == ["c.pem"]
    assert values_of(flags, "--cors-allowed-origins") == ["*"]
    assert values_of(flags, "--max-payload-size") == ["99"]


def test_smg_outlasts_the_drain_of_a_worker() -> None:
    (grace,) = values_of(flags_of("--shutdown-timeout", "40.5"), "--shutdown-grace-period-secs")
    assert int(grace) > 40.5


@pytest.mark.parametrize(
    ("host", "router", "keys", "words"),
    [
        ("127.0.0.1", "vllm-router", OPEN, []),
        ("::1", "smg", OPEN, []),
        ("0.0.0.0", "smg", KEYS, []),
        ("0.0.0.0", "smg", OPEN, ["set an --api-key"]),
        ("10.0.0.1", "vllm-router", KEYS, ["add and remove workers"]),
        ("10.0.0.1", "vllm-router", OPEN, ["set an --api-key", "add and remove workers"]),
    ],
)
def test_what_others_may_do_is_warned_about(
    host: str, router: RouterName, keys: Keys, words: list[str]
) -> None:
    found = list(dangers(parse("m", "--host", host), router, keys))
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


def test_vllm_router_has_no_tls() -> None:
    with pytest.raises(ServerConfigError, match="no TLS"):
        flags_of("--ssl-certfile", "c.pem", router="vllm-router")


def test_a_missing_router_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerConfigError, match=r"run `pip install 'shortfin-llm\[cluster\]'`"):
        check_installed("smg")


def test_the_http_client_of_another_router_is_in_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "httpx" else name)
    with pytest.raises(
        ServerConfigError, match=r"httpx is not installed: run `pip install 'shortfin-llm\[cluster\]'`"
    ):
        check_installed("vllm-router")


@pytest.mark.parametrize("router", ROUTER_NAMES)
@pytest.mark.parametrize("keys", [KEYS, OPEN])
def test_the_router_itself_takes_the_flags(router: RouterName, keys: Keys) -> None:
    launch = pytest.importorskip(f"{PACKAGES[router]}.launch_router", reason=f"{router} is not installed")
    args = launch.parse_router_args(flags_of("--cors-origin", "*", keys=keys, router=router))
    assert args.worker_urls == ["http://127.0.0.1:5001", "http://127.0.0.1:5002"]
    assert args.health_check_endpoint == "/ready"
