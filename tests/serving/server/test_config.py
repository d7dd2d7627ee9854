from __future__ import annotations

from pathlib import Path

import pytest

from shortfin_apps.llm.components.batching import MODE_CHOICES
from shortfin_apps.llm.components.batching.modes.auto import AutoModeOptions
from shortfin_apps.llm.components.batching.modes.default import DefaultModeOptions
from shortfin_apps.llm.components.batching.modes.extend_attention import ExtendAttentionOptions
from shortfin_apps.llm.components.batching.scheduler import DEFAULT_SCHEDULING
from shortfin_apps.llm.serving.server.config import ServerConfigError, flag
from tests.serving.server.settings import notes_of, parse


def test_only_the_model_directory_is_required() -> None:
    config = parse("DIR")
    assert config == parse("--artifact", "DIR")
    assert (config.artifact, config.host, config.port) == (Path("DIR"), "127.0.0.1", 8000)
    assert config.prefix_cache == "trie"
    assert config.decode_ahead == "auto"
    assert config.jump_ahead == "auto"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name the model to serve"),
        (["DIR", "--vmfb", "v"], "not both"),
        (["--vmfb", "v"], "--tokenizer_json is needed"),
        (["DIR", "--port", "x"], "`--port`"),
        (["DIR", "--port", "65536"], "`--port`"),
        (["DIR", "--prefix-cache", "radix"], "`--prefix-cache`"),
        (["DIR", "--decode-ahead", "2"], "`--decode-ahead`"),
        (["DIR", "--speculative", "eagle"], "`--speculative`"),
        (["DIR", "--jump-ahead", "maybe"], "`--jump-ahead`"),
        (["DIR", "--speculative", "ngram", "--speculative-tokens", "0"], "`--speculative-tokens`"),
        (["DIR", "--pages", "1"], "`--pages`"),
        (["DIR", "--pages", "all"], "`--pages`"),
        (["DIR", "--num_beams", "0"], "`--num-beams`"),
        (["DIR", "--default-temperature", "nan"], "`--default-temperature`"),
        (["DIR", "--config", "no-such-file"], "no-such-file"),
        (["DIR", "--ssl-keyfile", "k.pem"], "--ssl-certfile"),
        (["DIR", "--max-logprobs", "21"], "`--max-logprobs`"),
        (["DIR", "--max-queue-tokens", "0"], "`--max-queue-tokens`"),
        (["DIR", "--request-timeout", "0"], "`--request-timeout`"),
        (["DIR", "--stall-timeout", "inf"], "`--stall-timeout`"),
        (["DIR", "--tenant-weights", "alice"], "'alice' must be"),
        (["DIR", "--tenant-weights", "alice=0"], "'alice=0' must be"),
        (["DIR", "--tenant-weights", "=1"], "'=1' must be"),
        (["DIR", "--tenant-weights", "alice=100000000000000000"], "from 0.001 to 1000"),
        (["DIR", "--tenant-weights", "alice=0.0009"], "from 0.001 to 1000"),
    ],
)
def test_an_invalid_setting_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(ServerConfigError, match=message):
        parse(*argv)


@pytest.mark.parametrize(
    ("argv", "setting"),
    [
        (["--device_ids", "0", "1"], "--device-ids"),
        (["--device", "local-task", "--device-ids", "0"], "--device-ids"),
        (["--runtime", "shortfin", "--threads", "2"], "--threads"),
        (["--device", "hip", "--threads", "2"], "--threads"),
        (["--batch-mode", "extend-attention", "--prefills-per-decode", "2"], "--prefills-per-decode"),
        (["--speculative-tokens", "4"], "--speculative-tokens"),
        (["--speculative", "ngram", "--speculative-tokens", "4"], None),
        (["--speculative-model", "SMALL", "--speculative-tokens", "4"], None),
        (["--tenant-weights"], None),
        (["--api-processes", "2", "--stored-responses", "9"], "--stored-responses"),
        (["--api-processes", "2", "--stored-responses", "0"], None),
        (["--stored-responses", "0", "--stored-responses-ttl", "9"], "--stored-responses-ttl"),
        (["--stored-responses", "9", "--stored-responses-ttl", "9"], None),
        (["--device", "hip", "--device-ids", "0"], None),
        (["--threads", "2"], None),
        (["--prefills-per-decode", "2"], None),
        (["--batch-mode", "extend-attention"], None),
    ],
)
def test_a_setting_without_effect_is_noted(argv: list[str], setting: str | None) -> None:
    noted = [note.split("`")[1] for note in notes_of("DIR", *argv)]
    assert noted == ([] if setting is None else [setting])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["DIR", "--parameters", "a.irpa"], "--parameters, not both"),
        (["DIR", "--tokenizer-config-json", "t.json"], "--tokenizer_config_json, not both"),
        (["DIR", "--chunk-tokens", "64", "--chunk-block-size", "4"], "--chunk-tokens or --chunk-block-size"),
    ],
)
def test_two_settings_for_one_thing_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ServerConfigError, match=message):
        parse(*argv)


@pytest.mark.parametrize(
    "setting", ["host", "artifact", "vmfb", "tokenizer_json", "ssl_certfile", "ssl_keyfile_password"]
)
def test_an_empty_value_is_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty host would be every address, and an empty path the working directory."""
    monkeypatch.setenv(f"SHORTFIN_LLM_{setting.upper()}", "")
    with pytest.raises(ServerConfigError, match=f"`{flag(setting)}`: .*empty"):
        parse(*([] if setting == "artifact" else ["DIR"]))


def test_weights_are_read_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse("DIR", "--tenant-weights", "alice=3", "a=b=0.5")
    assert config.scheduling_options().tenant_weights == {"alice": 3.0, "a=b": 0.5}
    monkeypatch.setenv("SHORTFIN_LLM_TENANT_WEIGHTS", "carol=2,dan=1")
    assert parse("DIR").scheduling_options().tenant_weights == {"carol": 2.0, "dan": 1.0}


def test_a_mode_gets_its_settings_by_name_and_lengths_in_tokens() -> None:
    argv = ["--chunk-block-size", "2", "--token-budget", "128", "--idle-budget", "300"]
    given = {"chunk_tokens": 32, "token_budget": 128, "idle_budget": 300}
    config = parse("DIR", *argv, "--prefills-per-decode", "3")
    assert config.mode_options(stride=16) == AutoModeOptions(**given, prefills_per_decode=3)
    config = parse("DIR", *argv, "--prefills-per-decode", "3", "--batch-mode", "default")
    assert config.mode_options(stride=16) == DefaultModeOptions(**given, prefills_per_decode=3)
    config = parse("DIR", *argv, "--batch-mode", "extend-attention")
    assert config.mode_options(stride=16) == ExtendAttentionOptions(**given)


def test_modes_and_the_server_have_the_same_defaults() -> None:
    assert parse("DIR").mode_options(stride=16) == AutoModeOptions()
    for name, options in MODE_CHOICES.items():
        assert parse("DIR", "--batch-mode", name).mode_options(stride=16) == options()
    assert parse("DIR").scheduling_options() == DEFAULT_SCHEDULING


@pytest.mark.parametrize("name", ["--kv-events-endpoint", "--kv-events-replay-endpoint"])
@pytest.mark.parametrize(
    ("endpoint", "accepted"),
    [
        ("tcp://*:5557", True),
        ("tcp://127.0.0.1:*", True),
        ("tcp://[::1]:65535", True),
        ("ipc:///run/kv", True),
        ("tcp://127.0.0.1:65536", False),
        ("tcp://127.0.0.1", False),
        ("tcp://:5557", False),
        ("127.0.0.1:5557", False),
        ("inproc://kv", False),
        ("http://127.0.0.1:5557", False),
        ("", False),
    ],
)
def test_an_endpoint_of_kv_events_is_checked(name: str, endpoint: str, accepted: bool) -> None:
    if accepted:
        parse("DIR", name, endpoint)
    else:
        with pytest.raises(ServerConfigError, match=f"`{name}`"):
            parse("DIR", name, endpoint)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--kv-events-topic", "t"), "--kv-events-topic"),
        (("--kv-events-hash-seed", "0"), "--kv-events-hash-seed"),
        (("--kv-events-replay-endpoint", "tcp://*:1"), "--kv-events-replay-endpoint"),
        (("--kv-events-endpoint", "tcp://*:1", "--prefix-cache", "none"), "--kv-events-endpoint"),
    ],
)
def test_settings_of_kv_events_without_effect_are_named(flags: tuple[str, ...], named: str) -> None:
    [note] = notes_of("DIR", *flags)
    assert named in note
