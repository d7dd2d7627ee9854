"""Keys of callers, from settings and from files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import SecretStr

from shortfin_apps.llm.serving.api.auth import KeyRing
from shortfin_apps.llm.serving.server.config import ServerConfig, ServerConfigError

KEY = re.compile(r"(?!,+$)[\x21-\x7e]+")  # a key of only commas is an empty list


def key_ring(config: ServerConfig) -> KeyRing:
    """Return the server's keys. Raises ServerConfigError like `read_keys`, and for a key with two roles."""
    keys = read_keys(config.api_key, config.api_key_file)
    admin_keys = read_keys(config.admin_api_key, config.admin_api_key_file)
    gateway_keys = read_keys(config.gateway_key, config.gateway_key_file)
    if not set(gateway_keys).isdisjoint((*keys, *admin_keys)):
        raise ServerConfigError(
            "a gateway key is an API key or an admin key, too, so its other holders could name any tenant; "
            "give the gateway a key of its own"
        )
    return KeyRing(keys, admin_keys, gateway_keys, config.tenant_header)


def read_keys(given: Sequence[SecretStr], path: Path | None) -> list[str]:
    """Return the given keys, then the keys in the file, one per line without empty lines and # comments.

    Only line feeds end a line, and only spaces, tabs and carriage returns around a key are stripped. Any
    other control character is an error and must not split a key in two. Raises ServerConfigError; its message
    never contains a key.
    """
    keys = [key.get_secret_value() for key in given]
    if path is not None:
        try:
            lines = [line.strip(" \t\r") for line in path.read_bytes().decode("utf-8").split("\n")]
        except (OSError, UnicodeDecodeError) as error:
            raise ServerConfigError(f"{path}: cannot be read as a file of keys ({error})") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ServerConfigError(f"{path}: holds no key; write one a line")
        keys += found
    if not all(KEY.fullmatch(key) for key in keys):
        raise ServerConfigError("a key must be made of visible ASCII characters, without spaces")
    return keys
