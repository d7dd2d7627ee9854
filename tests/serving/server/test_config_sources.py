from __future__ import annotations

from pathlib import Path

import pytest

from shortfin_apps.llm.serving.server.config import KEYS, ServerConfigError
from tests.serving.server.settings import notes_of, parse

SECRET = "sk-do-not-show"


def test_special_tokens_in_content_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("DIR").requests.special_in_content
    assert not parse("DIR", "--no-special-in-content").requests.special_in_content
    monkeypatch.setenv("SHORTFIN_LLM_SPECIAL_IN_CONTENT", "false")
    assert not parse("DIR").requests.special_in_content


def test_flags_over_environment_over_yaml_over_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("port: 1\npages: 2\nthreads: 3\nmax-queue: 4\nprefix_sharing_algorithm: none\n")
    monkeypatch.setenv("SHORTFIN_LLM_PORT", "11")
    monkeypatch.setenv("SHORTFIN_LLM_PAGES", "12")
    monkeypatch.setenv("SHORTFIN_LLM_DEVICE_IDS", "0,1")
    config = parse("DIR", "--config", str(path), "--port", "21")
    assert (config.http.port, config.engine.pages, config.engine.threads, config.engine.max_queue) == (
        21,
        12,
        3,
        4,
    )
    assert (config.engine.prefix_cache, config.engine.device_ids) == ("none", ("0", "1"))


def test_a_switch_stands_for_a_value_of_its_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert parse("DIR").engine.static_threshold is None
    assert parse("DIR", "--enforce-eager").engine.static_threshold == 0
    assert parse("DIR", "--enforce_eager").engine.static_threshold == 0
    path = tmp_path / "server.yaml"
    path.write_text("enforce-eager: true\n")
    assert parse("DIR", "--config", str(path)).engine.static_threshold == 0
    assert parse("DIR", "--config", str(path), "--static-threshold", "64").engine.static_threshold == 64
    monkeypatch.setenv("SHORTFIN_LLM_ENFORCE_EAGER", "false")
    assert parse("DIR").engine.static_threshold is None
    monkeypatch.setenv("SHORTFIN_LLM_ENFORCE_EAGER", "1")
    assert parse("DIR").engine.static_threshold == 0
    assert notes_of("DIR") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "enforce_eager: true\nstatic_threshold: 64\n",
            "server.yaml: `enforce_eager` stands for `--static-threshold 0`",
        ),
        ("enforce_eager: perhaps\n", "server.yaml: `enforce_eager`: must be true or false, not 'perhaps'"),
    ],
)
def test_a_switch_that_contradicts_its_setting_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(content)
    with pytest.raises(ServerConfigError, match=message):
        parse("DIR", "--config", str(path))


def test_a_switch_and_its_setting_exclude_each_other_on_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse("DIR", "--static-threshold", "64", "--enforce-eager")
    assert "not allowed with argument" in capsys.readouterr().err


def test_upstreams_server_config_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "server_config.json"
    path.write_text('{"prefix_sharing_algorithm": "none", "decode_config": {"num_beams": 1}}')
    assert parse("DIR", "--server_config", str(path)).engine.prefix_cache == "none"


@pytest.mark.parametrize("content", ["- a", "prot: 1", "{", "port: [1]", "port: 2001-99-99", "[" * 1000])
def test_a_bad_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(content)
    with pytest.raises(ServerConfigError, match=r"server\.yaml: "):
        parse("DIR", "--config", str(path))


def test_a_missing_file_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ServerConfigError) as refusal:
        parse("DIR", "--config", str(tmp_path / "none"))
    expected = f"{tmp_path / 'none'}: cannot be read (No such file or directory); check its path"
    assert str(refusal.value) == expected


@pytest.mark.parametrize(
    ("content", "called"),
    [
        ("port: abc\n", "`port`: .*not 'abc'"),
        ("max-queue: -1\n", "`max-queue`: .*not -1"),
        ("prefix_sharing_algorithm: tree\n", "`prefix_sharing_algorithm`: .*not 'tree'"),
        ("api_key: ''\n", "`api_key`: .*empty"),
    ],
)
def test_an_invalid_value_of_a_file_is_named_with_the_file_and_its_key(
    content: str, called: str, tmp_path: Path
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(content)
    with pytest.raises(ServerConfigError, match=rf"^{path}: {called}"):
        parse("DIR", "--config", str(path))
    name = content.partition(":")[0].replace("prefix_sharing_algorithm", "prefix_cache")
    with pytest.raises(ServerConfigError, match=f"^`--{name.replace('_', '-')}`: "):
        parse("DIR", "--config", str(path), f"--{name}=")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("port: 1\npages: 2\nport: 3\n", r"a key is set twice, line 3, column 1"),
        ('{"port": 1, "port": 3}', "a key is set twice"),
        ("max-queue: 4\nmax_queue: 5\n", "sets `max_queue` twice, as `max_queue` too"),
        ("prefix_cache: trie\nprefix_sharing_algorithm: none\n", "as `prefix_sharing_algorithm` too"),
        ("prot: 1\n", r"`prot` \(did you mean `port`\?\)"),
        ("qqqqqq: 1\n", "there is no setting `qqqqqq`; `serve --help-all`"),
    ],
)
def test_a_repeated_or_unknown_setting_of_a_file_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(content)
    with pytest.raises(ServerConfigError, match=rf"server\.yaml: .*{message}"):
        parse("DIR", "--config", str(path))


def test_an_invalid_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_PORT", "abc")
    with pytest.raises(ServerConfigError, match=r"`SHORTFIN_LLM_PORT`: .*not 'abc'"):
        parse("DIR")
    assert parse("DIR", "--port", "1").http.port == 1
    with pytest.raises(ServerConfigError, match="`--port`"):
        parse("DIR", "--port", "x")


SECRET_FILES = (*KEYS, "ssl_keyfile", "receipt_key")


@pytest.mark.parametrize("name", SECRET_FILES)
@pytest.mark.parametrize(
    ("mode", "noted"), [(0o600, None), (0o640, None), (0o644, "read"), (0o602, "change"), (0o666, "change")]
)
def test_a_secret_that_everyone_can_read_is_noted(
    name: str, mode: int, noted: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "a secret"
    path.write_text(SECRET)
    path.chmod(mode)
    certificate = ["--ssl-certfile", "c"] if name == "ssl_keyfile" else []
    notes = [
        note
        for note in notes_of("DIR", f"--{name}", f"{'@' if name in KEYS else ''}{path}", *certificate)
        if "secret" in note
    ]
    assert len(notes) == (noted is not None)
    assert all(f"can {noted} it; `chmod o= '{path}'`" in note and SECRET not in note for note in notes)


def test_certificates_that_everyone_can_read_are_noted_if_the_key_is_with_them(tmp_path: Path) -> None:
    path = tmp_path / "both.pem"
    path.write_text(SECRET)
    path.chmod(0o644)
    assert [f"{path} has a secret" in note for note in notes_of("DIR", "--ssl-certfile", str(path))] == [True]
    assert notes_of("DIR", "--ssl-certfile", str(path), "--ssl-keyfile", str(tmp_path / "key")) == []


@pytest.mark.parametrize("setting", KEYS)
def test_settings_with_secrets_that_everyone_can_read_are_noted(setting: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"{setting.replace('_', '-')}: {SECRET}\n")
    path.chmod(0o644)
    assert any(f"{path} has a secret" in note for note in notes_of("DIR", "--config", str(path)))
    path.chmod(0o600)
    assert not any("has a secret" in note for note in notes_of("DIR", "--config", str(path)))
    path.write_text("port: 1\n")
    path.chmod(0o644)
    assert notes_of("DIR", "--config", str(path)) == []


@pytest.mark.parametrize("spelling", ["extend-attention", "extend_attention"])
def test_a_batch_mode_is_spelled_like_a_flag(spelling: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"batch_mode: {spelling}")
    assert parse("DIR", "--batch_mode", spelling).engine.batching.batch_mode == "extend-attention"
    assert parse("DIR", "--config", str(path)).engine.batching.batch_mode == "extend-attention"


def test_each_ignored_upstream_setting_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "server_config.json"
    path.write_text(
        '{"decode_config": {"num_beams": 4, "eos_token_id": 2}, "program_isolation": "per_fiber",'
        ' "amdgpu_allocators": null}'
    )
    noted = {note.split("`")[1] for note in notes_of("DIR", "--server_config", str(path))}
    assert noted == {"decode_config.num_beams", "decode_config.eos_token_id", "program_isolation"}
    path.write_text('{"decode_config": "x"}')
    assert [note.split("`")[1] for note in notes_of("DIR", "--config", str(path))] == ["decode_config"]


@pytest.mark.parametrize(
    "value", [f"[{SECRET}", f'"{SECRET}\\q"', f"{SECRET}: x", f"!{SECRET}", f"*{SECRET}"]
)
def test_a_file_with_a_fault_in_its_keys_is_refused_without_showing_them(value: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"port: 1\napi_key: {value}\nthreads: 1\n")
    with pytest.raises(
        ServerConfigError, match=r"not readable as YAML \(.*, line [23], column \d+\)$"
    ) as refusal:
        parse("DIR", "--config", str(path))
    assert SECRET not in str(refusal.value)


def test_secrets_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.setenv(f"SHORTFIN_LLM_{name.upper()}", SECRET)
    config = parse("DIR")
    assert SECRET not in repr(config)
    assert SECRET not in str(config.to_json())
    for name in KEYS:
        (tmp_path / "c.yaml").write_text(f"{name}: {{a: {SECRET}}}")
        monkeypatch.delenv(f"SHORTFIN_LLM_{name.upper()}")  # it would win
        with pytest.raises(ServerConfigError) as caught:
            parse("DIR", "--config", str(tmp_path / "c.yaml"))
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("SHORTFIN_LLM_API_KEYS", " (did you mean `SHORTFIN_LLM_API_KEY`?)"),
        ("SHORTFIN_LLM_APIKEY", " (did you mean `SHORTFIN_LLM_API_KEY`?)"),
        ("shortfin_llm_prot", " (did you mean `SHORTFIN_LLM_PORT`?)"),
        ("SHORTFIN_LLM_ENFORCE_EAGR", " (did you mean `SHORTFIN_LLM_ENFORCE_EAGER`?)"),
        ("SHORTFIN_LLM_HTTP_PORT", " (did you mean `SHORTFIN_LLM_PORT`?)"),
        ("SHORTFIN_LLM_QQQQQQ", ""),
        ("SHORTFIN_LLM_", ""),
    ],
)
def test_an_unknown_variable_is_refused(name: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt key would leave the server open."""
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", "of `build`")
    assert notes_of("DIR") == []
    monkeypatch.setenv(name, SECRET)
    with pytest.raises(ServerConfigError) as refusal:
        parse("DIR")
    assert str(refusal.value) == f"there is no setting `{name}`{hint}; `serve --help-all` lists them"


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


def test_the_variables_of_a_kubernetes_service_are_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_all(monkeypatch, SERVICE)
    assert parse("DIR") == parse("DIR", "--port", "8000")
    [note] = notes_of("DIR")
    assert "`SHORTFIN_LLM_PORT`" in note
    assert "enableServiceLinks" in note
    path = tmp_path / "server.yaml"
    path.write_text("port: 9")
    assert parse("DIR", "--config", str(path)).http.port == 9, (
        "the file's port counts where the variable does not"
    )


@pytest.mark.parametrize("value", ["tcp://[fd00::1]:80", "udp://10.0.0.1:53", "sctp://10.0.0.1:1"])
def test_a_service_link_of_any_protocol_is_ignored(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_PORT", value)
    assert parse("DIR").http.port == 8000


def test_variables_of_a_service_with_a_similar_name_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, NEIGHBOUR)
    assert notes_of("DIR") == []


@pytest.mark.parametrize("value", ["http://10.0.0.1:80", "tcp://", "tcp", ":80", "80,81", ""])
def test_an_invalid_port_in_a_variable_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_PORT", value)
    with pytest.raises(ServerConfigError, match="`SHORTFIN_LLM_PORT`"):
        parse("DIR")


@pytest.mark.parametrize("argv", [["--port", "tcp://10.0.0.1:80"], ["--host", ""]])
def test_an_invalid_flag_is_refused(argv: list[str]) -> None:
    with pytest.raises(ServerConfigError, match=f"`{argv[0]}`"):
        parse("DIR", *argv)
