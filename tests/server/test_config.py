from __future__ import annotations

import re
from pathlib import Path

import pytest

from shortfin_apps.llm.server.config import (
    SECRETS,
    ServerConfig,
    ServerConfigError,
    read_keys,
)
from tests.server.settings import notes_of, parse


def test_a_directory_is_all_it_takes() -> None:
    config = parse("DIR")
    assert config == parse("--artifact", "DIR")
    assert (config.artifact, config.host, config.port) == (Path("DIR"), "127.0.0.1", 8000)
    assert config.prefix_cache == "trie"


def test_special_tokens_in_content_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("DIR").special_in_content
    assert not parse("DIR", "--no-special-in-content").special_in_content
    monkeypatch.setenv("SHORTFIN_LLM_SPECIAL_IN_CONTENT", "false")
    assert not parse("DIR").special_in_content


def test_flags_over_environment_over_yaml_over_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("port: 1\npages: 2\nthreads: 3\nmax-queue: 4\nprefix_sharing_algorithm: none\n")
    monkeypatch.setenv("SHORTFIN_LLM_PORT", "11")
    monkeypatch.setenv("SHORTFIN_LLM_PAGES", "12")
    monkeypatch.setenv("SHORTFIN_LLM_DEVICE_IDS", "0,1")
    config = parse("DIR", "--config", str(path), "--port", "21")
    assert (config.port, config.pages, config.threads, config.max_queue) == (21, 12, 3, 4)
    assert (config.prefix_cache, config.device_ids) == ("none", ("0", "1"))


def test_upstreams_server_config_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "server_config.json"
    path.write_text('{"prefix_sharing_algorithm": "none", "decode_config": {"num_beams": 1}}')
    assert parse("DIR", "--server_config", str(path)).prefix_cache == "none"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name the model directory"),
        (["DIR", "--vmfb", "v"], "not both"),
        (["--vmfb", "v"], "--tokenizer_json is needed"),
        (["DIR", "--port", "x"], "`--port`"),
        (["DIR", "--port", "65536"], "`--port`"),
        (["DIR", "--prefix-cache", "radix"], "`--prefix-cache`"),
        (["DIR", "--token-budget", "256", "--max-pages-per-batch", "16"], "not both"),
        (["DIR", "--max_pages_per_batch", "1"], "`--max-pages-per-batch`"),
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
def test_what_is_wrong_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(ServerConfigError, match=message):
        parse(*argv)


@pytest.mark.parametrize("content", ["- a", "prot: 1", "{", "port: [1]"])
def test_a_bad_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(content)
    with pytest.raises(ServerConfigError, match=r"server\.yaml|`prot`|`--port`"):
        parse("DIR", "--config", str(path))


@pytest.mark.parametrize("spelling", ["extend-attention", "extend_attention"])
def test_a_batch_mode_is_spelled_like_a_flag(spelling: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"batch_mode: {spelling}")
    assert parse("DIR", "--batch_mode", spelling).batch_mode == "extend-attention"
    assert parse("DIR", "--config", str(path)).batch_mode == "extend-attention"


def test_what_upstream_reads_and_we_do_not_is_noted_by_name(tmp_path: Path) -> None:
    path = tmp_path / "server_config.json"
    path.write_text(
        '{"decode_config": {"num_beams": 4, "eos_token_id": 2}, "program_isolation": "per_fiber",'
        ' "amdgpu_allocators": null}'
    )
    told = {note.split("`")[1] for note in notes_of("DIR", "--server_config", str(path))}
    assert told == {"decode_config.num_beams", "decode_config.eos_token_id", "program_isolation"}
    path.write_text('{"decode_config": "x"}')
    assert [note.split("`")[1] for note in notes_of("DIR", "--config", str(path))] == ["decode_config"]


@pytest.mark.parametrize(
    ("argv", "setting"),
    [
        (["--device_ids", "0", "1"], "--device-ids"),
        (["--device", "local-task", "--device-ids", "0"], "--device-ids"),
        (["--runtime", "shortfin", "--threads", "2"], "--threads"),
        (["--device", "hip", "--threads", "2"], "--threads"),
        (["--batch-mode", "extend-attention", "--prefills-per-decode", "2"], "--prefills-per-decode"),
        (["--tenant-weights"], None),
        (["--device", "hip", "--device-ids", "0"], None),
        (["--threads", "2"], None),
        (["--prefills-per-decode", "2"], None),
        (["--batch-mode", "extend-attention"], None),
    ],
)
def test_a_setting_without_effect_beside_another_is_noted(argv: list[str], setting: str | None) -> None:
    told = [note.split("`")[1] for note in notes_of("DIR", *argv)]
    assert told == ([] if setting is None else [setting])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["DIR", "--parameters", "a.irpa"], "--parameters, not both"),
        (["DIR", "--tokenizer-config-json", "t.json"], "--tokenizer_config_json, not both"),
        (["DIR", "--chunk-tokens", "64", "--chunk-block-size", "4"], "--chunk-tokens or --chunk-block-size"),
    ],
)
def test_of_two_settings_for_one_thing_none_is_dropped(argv: list[str], message: str) -> None:
    with pytest.raises(ServerConfigError, match=message):
        parse(*argv)


SECRET = "sk-do-not-show"


def test_keys_come_from_flags_environment_and_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the night shift\n\n  k3  \nk4\n")
    config = parse("--api-key", "k1", "--api_key", "k2", "--api-key-file", str(path), "DIR")
    assert read_keys(config.api_key, config.api_key_file) == ["k1", "k2", "k3", "k4"]
    monkeypatch.setenv("SHORTFIN_LLM_API_KEY", "k5,k6")
    monkeypatch.setenv("SHORTFIN_LLM_ADMIN_API_KEY", "k7")
    config = parse("DIR")
    assert read_keys(config.api_key, None) == ["k5", "k6"]
    assert read_keys(config.admin_api_key, None) == ["k7"]


def test_secrets_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(f"SHORTFIN_LLM_{name.upper()}", SECRET)
    monkeypatch.setenv("SHORTFIN_LLM_SSL_CERTFILE", "c.pem")
    config = parse("DIR")
    assert SECRET not in repr(config)
    assert SECRET not in str(config.model_dump(mode="json"))
    for name in SECRETS:
        (tmp_path / "c.yaml").write_text(f"{name}: {{a: {SECRET}}}")
        monkeypatch.delenv(f"SHORTFIN_LLM_{name.upper()}")  # it would win
        with pytest.raises(ServerConfigError) as caught:
            parse("DIR", "--config", str(tmp_path / "c.yaml"))
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("content", ["", "# only\n", "two words\n", "schlüssel\n", "bell\x07\n"])
def test_a_file_without_proper_keys_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ServerConfigError, match="key") as caught:
        read_keys([], path)
    assert "two words" not in str(caught.value)


def test_a_missing_or_unreadable_key_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ServerConfigError, match=re.escape(str(path))):
            read_keys([], path)


def test_an_empty_key_is_none() -> None:
    with pytest.raises(ServerConfigError, match="visible ASCII"):
        read_keys(parse("DIR", "--api-key", " ").api_key, None)
    with pytest.raises(ServerConfigError, match="visible ASCII"):
        read_keys(parse("DIR", "--api-key", ",").api_key, None)


KEY_SETTINGS = ("api_key", "admin_api_key", "api_key_file", "admin_api_key_file")


def keys_of(config: ServerConfig) -> list[str]:
    return [
        *read_keys(config.api_key, config.api_key_file),
        *read_keys(config.admin_api_key, config.admin_api_key_file),
    ]


def named(setting: str) -> str:
    return f"`--{setting.replace('_', '-')}`"


@pytest.mark.parametrize("setting", KEY_SETTINGS)
@pytest.mark.parametrize("value", ["", ",", ",,", " ", "k,", ",k", "k,,l"])
def test_keys_in_the_environment_that_are_set_but_empty_are_refused(
    setting: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"SHORTFIN_LLM_{setting.upper()}", value)
    with pytest.raises(ServerConfigError):
        keys_of(parse("DIR"))


@pytest.mark.parametrize("setting", KEY_SETTINGS)
def test_an_empty_key_setting_is_named(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"SHORTFIN_LLM_{setting.upper()}", "")
    with pytest.raises(ServerConfigError, match=f"{named(setting)}: .*empty"):
        parse("DIR")


@pytest.mark.parametrize("setting", KEY_SETTINGS)
@pytest.mark.parametrize("value", ["", '""', "[]", "[null]", "['']", "null", "~"])
def test_keys_in_a_file_that_are_set_but_empty_are_refused(setting: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"{setting}: {value}\n")
    with pytest.raises(ServerConfigError, match=named(setting)):
        parse("DIR", "--config", str(tmp_path / "c.yaml"))


@pytest.mark.parametrize("setting", KEY_SETTINGS)
@pytest.mark.parametrize("value", ["", ",", " "])
def test_flags_without_a_key_are_refused(
    setting: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ServerConfigError):
        keys_of(parse("DIR", f"--{setting}={value}"))


def test_one_empty_flag_is_not_hidden_by_another() -> None:
    with pytest.raises(ServerConfigError, match="`--api-key`"):
        parse("DIR", "--api-key", "k", "--api-key", "")


@pytest.mark.parametrize(
    "setting", ["host", "artifact", "vmfb", "tokenizer_json", "ssl_certfile", "ssl_keyfile_password"]
)
def test_what_is_empty_does_not_stand_for_a_default(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty host would be every address, and an empty path the working directory."""
    monkeypatch.setenv(f"SHORTFIN_LLM_{setting.upper()}", "")
    with pytest.raises(ServerConfigError, match=f"{named(setting)}: .*empty"):
        parse(*([] if setting == "artifact" else ["DIR"]))


@pytest.mark.parametrize("name", ["SHORTFIN_LLM_API_KEYS", "SHORTFIN_LLM_APIKEY", "shortfin_llm_prot"])
def test_a_variable_that_names_no_setting_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt key would leave the server open without a word."""
    monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", "of `build`")
    [note] = notes_of("DIR")
    assert name in note
    assert SECRET not in note


SERVICE = {  # what Kubernetes sets in every pod beside a Service named `shortfin-llm`
    "SHORTFIN_LLM_SERVICE_HOST": "10.0.171.239",
    "SHORTFIN_LLM_SERVICE_PORT": "8000",
    "SHORTFIN_LLM_SERVICE_PORT_HTTP_METRICS": "8000",
    "SHORTFIN_LLM_PORT": "tcp://10.0.171.239:8000",
    "SHORTFIN_LLM_PORT_8000_TCP": "tcp://10.0.171.239:8000",
    "SHORTFIN_LLM_PORT_8000_TCP_PROTO": "tcp",
    "SHORTFIN_LLM_PORT_8000_TCP_PORT": "8000",
    "SHORTFIN_LLM_PORT_8000_TCP_ADDR": "10.0.171.239",
}
NEIGHBOUR = {name.replace("LLM", "LLM_CANARY"): value for name, value in SERVICE.items()}


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_the_variables_of_a_kubernetes_service_are_no_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_all(monkeypatch, SERVICE)
    assert parse("DIR") == parse("DIR", "--port", "8000")
    [note] = notes_of("DIR")
    assert "`SHORTFIN_LLM_PORT`" in note
    assert "enableServiceLinks" in note
    path = tmp_path / "server.yaml"
    path.write_text("port: 9")
    assert parse("DIR", "--config", str(path)).port == 9, "the file's port counts where the variable does not"


@pytest.mark.parametrize("value", ["tcp://[fd00::1]:80", "udp://10.0.0.1:53", "sctp://10.0.0.1:1"])
def test_every_protocol_of_a_service_is_known(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_PORT", value)
    assert parse("DIR").port == 8000


def test_a_service_whose_name_begins_like_ours_is_nobodys_business(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, NEIGHBOUR)
    assert notes_of("DIR") == []


@pytest.mark.parametrize("value", ["http://10.0.0.1:80", "tcp://", "tcp", ":80", "80,81", ""])
def test_other_ports_that_are_none_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_PORT", value)
    with pytest.raises(ServerConfigError, match="`--port`"):
        parse("DIR")


@pytest.mark.parametrize("argv", [["--port", "tcp://10.0.0.1:80"], ["--host", ""]])
def test_a_flag_is_meant(argv: list[str]) -> None:
    with pytest.raises(ServerConfigError, match=f"`{argv[0]}`"):
        parse("DIR", *argv)


def test_weights_are_read_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse("DIR", "--tenant-weights", "alice=3", "a=b=0.5")
    assert config.weight_of_tenant == {"alice": 3.0, "a=b": 0.5}
    monkeypatch.setenv("SHORTFIN_LLM_TENANT_WEIGHTS", "carol=2,dan=1")
    assert parse("DIR").weight_of_tenant == {"carol": 2.0, "dan": 1.0}
