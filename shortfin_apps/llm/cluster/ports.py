"""TCP ports for processes that bind them themselves."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable
from typing import NamedTuple

from shortfin_apps.llm.server.config import ServerConfigError

LOOPBACK = "127.0.0.1"


class Wanted(NamedTuple):
    """A port that is to be free on `host`, 0 for any; `flag` sets it, for the error message."""

    host: str
    port: int
    flag: str


def free_ports(wanted: Iterable[Wanted]) -> list[int]:
    """A free port for each, all different. Raises ServerConfigError, which names the flag, for one in use.

    Another process may still take a port before the one it is meant for, which then fails and says so.
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
