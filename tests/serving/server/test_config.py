from __future__ import annotations

from pathlib import Path

import pytest

from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.serving.server.config import ServerConfigError
from tests.serving.server.settings import notes_of, parse


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ([], 0),
        (["--device", "local-task"], 0),
        (["--device", "hip"], 1),
        (["--device", "cuda:1"], 1),
        (["--device", "hip", "--api-processes", "0"], 0),
        (["--api-processes", "3"], 3),
    ],
)
def test_a_gpus_engine_has_a_process_without_http(flags: list[str], processes: int) -> None:
    assert parse("DIR", *flags).api_processes == processes


def test_only_the_model_directory_is_required() -> None:
    config = parse("DIR")
    assert config == parse("--artifact", "DIR")
    assert (config.model.artifact, config.http.host, config.http.port) == (Path("DIR"), "127.0.0.1", 8000)
    assert config.engine.prefix_cache == "trie"
    assert config.engine.pipeline_depth is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name the model to serve"),
        (["DIR", "--vmfb", "v"], "not both"),
        (["--vmfb", "v"], "--tokenizer_json is needed"),
        (["DIR", "--port", "x"], "`--port`"),
        (["DIR", "--port", "65536"], "`--port`"),
        (["DIR", "--prefix-cache", "radix"], "`--prefix-cache`"),
        (["DIR", "--pipeline-depth", "3"], "`--pipeline-depth`"),
        (["DIR", "--static-threshold", "-1"], "`--static-threshold`"),
        (["DIR", "--speculative", "eagle"], "`--speculative`"),
        (["DIR", "--speculative", "ngram", "--speculative-tokens", "0"], "`--speculative-tokens`"),
        (["DIR", "--pages", "1"], "`--pages`"),
        (["DIR", "--threads", "65"], "`--threads`"),
        (["DIR", "--pages", "all"], "`--pages`"),
        (["DIR", "--default-temperature", "nan"], "`--default-temperature`"),
        (["DIR", "--config", "no-such-file"], "no-such-file"),
        (["DIR", "--ssl-keyfile", "k.pem"], "--ssl-certfile"),
        (["DIR", "--max-queue-tokens", "0"], "`--max-queue-tokens`"),
        (["DIR", "--request-timeout", "0"], "`--request-timeout`"),
        (["DIR", "--stall-timeout", "inf"], "`--stall-timeout`"),
        (["DIR", "--cors-origin", "app.example"], "`--cors-origin app.example` is no origin"),
        (["DIR", "--cors-origin", "https://a", "--cors-origin", "https://a.example/"], "https://a.example/"),
        (["DIR", "--cors-origin", "https://App.example"], "in lower case"),
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


def test_origins_are_taken_as_browsers_send_them() -> None:
    origins = ["*", "null", "https://a.example", "http://[::1]:3000", "chrome-extension://abc"]
    flags = [word for origin in origins for word in ("--cors-origin", origin)]
    assert parse("DIR", *flags).http.cors_origin == tuple(origins)


@pytest.mark.parametrize(
    ("argv", "setting"),
    [
        (["--device_ids", "0", "1"], "--device-ids"),
        (["--device", "local-task", "--device-ids", "0"], "--device-ids"),
        (["--runtime", "shortfin", "--threads", "2"], "--threads"),
        (["--device", "hip", "--threads", "2"], "--threads"),
        (["--speculative-tokens", "4"], "--speculative-tokens"),
        (["--speculative", "ngram", "--speculative-tokens", "4"], None),
        (["--speculative-model", "SMALL", "--speculative-tokens", "4"], None),
        (["--tenant-weights"], None),
        (["--api-processes", "2", "--stored-responses", "9"], "--stored-responses"),
        (["--api-processes", "2", "--stored-responses", "0"], None),
        (["--device", "hip", "--device-ids", "0"], None),
        (["--threads", "2"], None),
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
    ],
)
def test_two_settings_for_one_thing_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ServerConfigError, match=message):
        parse(*argv)


@pytest.mark.parametrize("setting", ["host", "artifact", "vmfb", "tokenizer_json", "ssl_certfile"])
def test_an_empty_value_is_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty host would be every address, and an empty path the working directory."""
    monkeypatch.setenv(f"SHORTFIN_LLM_{setting.upper()}", "")
    with pytest.raises(ServerConfigError, match=f"`SHORTFIN_LLM_{setting.upper()}`: .*empty"):
        parse(*([] if setting == "artifact" else ["DIR"]))


def test_weights_are_read_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse("DIR", "--tenant-weights", "alice=3", "a=b=0.5")
    assert config.engine.batching.tenant_weights == {"alice": 3.0, "a=b": 0.5}
    monkeypatch.setenv("SHORTFIN_LLM_TENANT_WEIGHTS", "carol=2,dan=1")
    assert parse("DIR").engine.batching.tenant_weights == {"carol": 2.0, "dan": 1.0}


def test_batching_gets_its_settings() -> None:
    assert parse("DIR").engine.batching == BatchSettings()
    config = parse("DIR", "--batch-mode", "default", "--chunk-tokens", "32", "--token-budget", "128")
    expected = BatchSettings(batch_mode="default", chunk_tokens=32, token_budget=128)
    assert config.engine.batching == expected


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
        (("--kv-events-replay-endpoint", "tcp://*:1"), "--kv-events-replay-endpoint"),
        (("--kv-events-endpoint", "tcp://*:1", "--prefix-cache", "none"), "--kv-events-endpoint"),
    ],
)
def test_settings_of_kv_events_without_effect_are_named(flags: tuple[str, ...], named: str) -> None:
    [note] = notes_of("DIR", *flags)
    assert named in note
