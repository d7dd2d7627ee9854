from __future__ import annotations

import re
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pydantic import SecretStr

from shortfin_apps.llm.serving.server.config import KEYS, ServerConfig, ServerConfigError
from shortfin_apps.llm.serving.server.keys import key_ring, read_keys, with_keys
from tests.serving.server.settings import notes_of, parse


def test_keys_come_from_flags_environment_and_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the night shift\n\n  k3  \nk4\n")
    config = parse("--api-key", "k1", "--api_key", "k2", "--api-key", f"@{path}", "DIR")
    assert read_keys(config.http.api_key) == ["k1", "k2", "k3", "k4"]
    monkeypatch.setenv("SHORTFIN_LLM_API_KEY", "k5,k6")
    monkeypatch.setenv("SHORTFIN_LLM_ADMIN_API_KEY", "k7")
    config = parse("DIR")
    assert read_keys(config.http.api_key) == ["k5", "k6"]
    assert read_keys(config.http.admin_api_key) == ["k7"]


@pytest.mark.parametrize("content", ["", "# only\n", "two words\n", "schlüssel\n", "bell\x07\n", "\ufeffk\n"])
def test_a_file_without_valid_keys_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ServerConfigError, match="key") as caught:
        read_keys([SecretStr(f"@{path}")])
    assert "two words" not in str(caught.value)


@pytest.mark.parametrize("end", ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\r"])
def test_only_line_feeds_separate_keys(end: str, tmp_path: Path) -> None:
    """Others would make two short keys of a damaged one, each of which opens the server."""
    (tmp_path / "keys").write_bytes(f"one{end}two\n".encode())
    with pytest.raises(ServerConfigError, match="visible ASCII"):
        read_keys([SecretStr(f"@{tmp_path / 'keys'}")])
    (tmp_path / "keys").write_bytes(b" one\t\r\n\r\n# no key\r\n  two")
    assert read_keys([SecretStr(f"@{tmp_path / 'keys'}")]) == ["one", "two"]


def test_a_missing_or_unreadable_key_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ServerConfigError, match=re.escape(str(path))):
            read_keys([SecretStr(f"@{path}")])


def test_usable_certificates_and_receipt_keys_are_accepted(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued = trustme.CA().issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    signing = Ed25519PrivateKey.generate()
    (tmp_path / "receipts.pem").write_bytes(
        signing.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    flags = ("--ssl-certfile", str(certificate), "--receipt-key", str(tmp_path / "receipts.pem"))
    config = with_keys(parse("DIR", *flags, "--ssl-keyfile", str(key)))
    assert config.http.ssl_keyfile == key
    with pytest.raises(ServerConfigError, match="--ssl-keyfile"):
        with_keys(parse("DIR", *flags))


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ServerConfigError, match="visible ASCII"):
        read_keys(parse("DIR", "--api-key", " ").http.api_key)
    with pytest.raises(ServerConfigError, match="visible ASCII"):
        read_keys(parse("DIR", "--api-key", ",").http.api_key)


def keys_of(config: ServerConfig) -> list[str]:
    return [key for name in KEYS for key in read_keys(getattr(config.http, name))]


@pytest.mark.parametrize("setting", KEYS)
@pytest.mark.parametrize("value", ["", ",", ",,", " ", "k,", ",k", "k,,l"])
def test_keys_in_the_environment_that_are_set_but_empty_are_refused(
    setting: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"SHORTFIN_LLM_{setting.upper()}", value)
    with pytest.raises(ServerConfigError):
        keys_of(parse("DIR"))


@pytest.mark.parametrize("setting", KEYS)
def test_an_empty_key_setting_is_named(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"SHORTFIN_LLM_{setting.upper()}", "")
    with pytest.raises(ServerConfigError, match=f"`SHORTFIN_LLM_{setting.upper()}`: .*empty"):
        parse("DIR")


@pytest.mark.parametrize("setting", KEYS)
@pytest.mark.parametrize("value", ["", '""', "[]", "[null]", "['']", "null", "~"])
def test_keys_in_a_file_that_are_set_but_empty_are_refused(setting: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"{setting}: {value}\n")
    with pytest.raises(ServerConfigError, match=f"c.yaml: `{setting}`: "):
        parse("DIR", "--config", str(tmp_path / "c.yaml"))


@pytest.mark.parametrize("setting", KEYS)
@pytest.mark.parametrize("value", ["", ",", " "])
def test_an_empty_key_flag_is_refused(
    setting: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ServerConfigError):
        keys_of(parse("DIR", f"--{setting}={value}"))


def test_one_empty_key_flag_among_several_is_refused() -> None:
    with pytest.raises(ServerConfigError, match="`--api-key`"):
        parse("DIR", "--api-key", "k", "--api-key", "")


def test_each_role_has_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "gateway"
    path.write_text("g2\n")
    flags = ("--api-key", "k", "--admin-api-key", "a", "--gateway-key", "g1", "--gateway-key", f"@{path}")
    keys = key_ring(parse("DIR", *flags))
    roles = {}
    for key in ("k", "a", "g1", "g2"):
        caller = keys.caller(key)
        assert caller is not None
        roles[key] = (caller.is_admin, caller.is_gateway)
    assert roles == {"k": (False, False), "a": (True, False), "g1": (False, True), "g2": (False, True)}
    assert keys.caller("g3") is None


@pytest.mark.parametrize("role", ["--api-key", "--admin-api-key"])
def test_a_gateway_key_with_a_second_role_is_refused(role: str) -> None:
    with pytest.raises(ServerConfigError, match="key of its own") as caught:
        key_ring(parse("DIR", "--gateway-key", "hush", role, "hush"))
    assert "hush" not in str(caught.value)


def test_the_header_of_tenants_is_a_setting() -> None:
    assert notes_of("DIR", "--gateway-key", "g", "--tenant-header", "X-Request-Id-Tenant") == []
    [note] = notes_of("DIR", "--tenant-header", "X-Request-Id-Tenant")
    assert "--tenant-header" in note
    with pytest.raises(ServerConfigError, match="--tenant-header"):
        parse("DIR", "--tenant-header", "X Tenant")
