"""TCP ports for processes that bind their ports themselves."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable
from typing import NamedTuple

from shortfin_apps.llm.serving.server.config import ServerConfigError

LOOPBACK = "127.0.0.1"


class Wanted(NamedTuple):
    """A port needed on `host`, 0 for any; `flag` sets it and is named in the error message."""

    host: str
    port: int
    flag: str


def free_ports(wanted: Iterable[Wanted]) -> list[int]:
    """Return a distinct free port for each. Raises ServerConfigError, naming the flag, for one in use.

    Another process may still take a port before its intended user, which then fails with an error.
    """
    with contextlib.ExitStack() as bound:
        sockets = [bound.enter_context(_bind(*each)) for each in wanted]
        return [sock.getsockname()[1] for sock in sockets]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind(host: str, port: int, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ServerConfigError(
            f"cannot listen on {host}, port {port} ({reason}); stop the program that uses it or choose"
            f" another `{flag}`"
        ) from None
