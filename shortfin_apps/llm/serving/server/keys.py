"""Keys of callers, from settings and from files."""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from pathlib import Path

from pydantic import SecretStr

from shortfin_apps.llm.serving.http.auth import KeyRing
from shortfin_apps.llm.serving.server.config import KEYS, ServerConfig, ServerConfigError, flag, key_file

KEY = re.compile(r"(?!,+$)(?!@)[\x21-\x7e]+")  # a key of only commas is an empty list


def key_ring(config: ServerConfig) -> KeyRing:
    """Return the server's keys.

    Raises ServerConfigError as `read_keys` does, and for a gateway key that is also an API or admin key.
    """
    keys, admin_keys, gateway_keys = (read_keys(getattr(config.http, name)) for name in KEYS)
    if not set(gateway_keys).isdisjoint((*keys, *admin_keys)):
        raise ServerConfigError(
            "a gateway key is an API key or an admin key, too, so its other holders could name any tenant; "
            "give the gateway a key of its own"
        )
    return KeyRing(keys, admin_keys, gateway_keys, config.http.tenant_header)


def with_keys(config: ServerConfig) -> ServerConfig:
    """Return the settings with the keys in place of the files of keys, which are read only here.

    Checks the keys, the certificate and the key of receipts before a build, which may take minutes. Raises
    ServerConfigError and ReceiptError.
    """
    config = config.changed(**{name: read_keys(config.given[name]) for name in KEYS if name in config.given})
    key_ring(config)
    for name in ("ssl_certfile", "ssl_keyfile", "receipt_key"):
        path = config.given.get(name)
        if path is not None and not path.exists():
            raise ServerConfigError(f"`{flag(name)}`: {path}: no such file; check its path")
    _check_certificate(config.http.ssl_certfile, config.http.ssl_keyfile)
    _check_receipt_key(config.requests.receipt_key)
    return config


def no_certificate(error: OSError) -> ServerConfigError:
    """Return the error for a certificate that cannot be loaded. An `ssl.SSLError` is an OSError."""
    return ServerConfigError(f"--ssl-certfile, --ssl-keyfile: not a certificate and its key ({error})")


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Load the certificate and its key, unless one is a pipe, which can be read only once."""
    if certificate is None or certificate.is_fifo() or (key is not None and key.is_fifo()):
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:
        raise no_certificate(error) from error


def _check_receipt_key(key: Path | None) -> None:
    """Load the key of receipts, unless it is a pipe, which can be read only once."""
    if key is None or key.is_fifo():
        return
    from shortfin_apps.llm.serving.receipts.signature import Signer

    Signer.load(key)


def read_keys(given: Sequence[SecretStr]) -> list[str]:
    """Return the keys; `@FILE` is replaced by the keys in a file, one per line.

    In a file, empty lines and # comments are skipped. Only line feeds end a line, and only spaces, tabs and
    carriage returns around a key are stripped: any other control character is an error, and does not split a
    key in two. Raises ServerConfigError with a message that never contains a key.
    """
    keys: list[str] = []
    for each in given:
        path = key_file(each)
        keys += [each.get_secret_value()] if path is None else _keys_in(path)
    if not all(KEY.fullmatch(key) for key in keys):
        raise ServerConfigError(
            "a key must be made of visible ASCII characters, without spaces or a leading @"
        )
    return keys


def _keys_in(path: Path) -> list[str]:
    try:
        lines = [line.strip(" \t\r") for line in path.read_bytes().decode("utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise ServerConfigError(f"{path}: cannot be read as a file of keys ({error})") from error
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ServerConfigError(f"{path}: holds no key; write one a line")
    return found
