from __future__ import annotations

import argparse
import logging
from pathlib import Path

import pytest

from shortfin_apps.llm.serving.server.config import ServerConfig
from shortfin_apps.llm.serving.server.flags import add_arguments, show_every_setting
from tests.serving.server.settings import parse

UPSTREAM = [
    "--tokenizer_json=t.json", "--model_config=m.json", "--vmfb=m.vmfb",
    "--parameters", "a.irpa", "b.irpa", "--device=local-task", "--device_ids", "0", "1",
    "--chunk_block_size=2", "--prefix_sharing_algorithm=none", "--program_isolation=per_call",
    "--use_native_impls", "--amdgpu_async_allocations", "--amdgpu_allocators=caching", "--num_beams=1",
]  # fmt: skip


def test_upstreams_command_line_works(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = parse(*UPSTREAM)
    assert config.model.parameters == (Path("a.irpa"), Path("b.irpa"))
    assert config.model.model_config == Path("m.json")
    assert (config.engine.device, config.engine.device_ids) == ("local-task", ("0", "1"))
    assert config.engine.prefix_cache == "none"
    ignored = {record.getMessage().split("`")[1] for record in caplog.records}
    assert ignored == {
        "chunk_block_size",
        "num_beams",
        "program_isolation",
        "use_native_impls",
        "amdgpu_async_allocations",
        "amdgpu_allocators",
        "--device-ids",
    }


def test_dashes_and_underscores_are_the_same() -> None:
    assert parse("DIR", "--shutdown-timeout", "3") == parse("DIR", "--shutdown_timeout", "3")


def test_a_switch_is_turned_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not parse("DIR").requests.strict_fields
    assert parse("DIR", "--strict-fields") == parse("DIR", "--strict_fields")
    monkeypatch.setenv("SHORTFIN_LLM_STRICT_FIELDS", "true")
    assert parse("DIR").requests.strict_fields
    assert not parse("DIR", "--no-strict-fields").requests.strict_fields
    assert not parse("DIR", "--no_strict_fields").requests.strict_fields


def test_there_are_few_settings() -> None:
    assert len(ServerConfig.SETTINGS) <= 61


def test_every_setting_has_a_flag_with_help() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    show_every_setting(parser)
    text = parser.format_help()
    for name, each in ServerConfig.SETTINGS.items():
        assert each.help
        assert name == "artifact" or f"--{name.replace('_', '-')}" in text


def test_the_help_shows_the_common_settings_on_two_screens() -> None:
    parser = argparse.ArgumentParser(formatter_class=lambda prog: argparse.HelpFormatter(prog, width=80))
    add_arguments(parser)
    text = parser.format_help()
    common = {name for name, each in ServerConfig.SETTINGS.items() if each.is_common} - {"artifact"}
    shown = {word.rstrip(",") for word in text.split() if word.startswith("--") and "--no-" not in word}
    assert {f"--{name.replace('_', '-')}" for name in common} <= shown
    assert "--drain-delay" not in shown
    assert len(text.splitlines()) <= 90


def test_help_all_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["--help-all"])
    assert "--drain-delay" in capsys.readouterr().out
