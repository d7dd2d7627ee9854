from __future__ import annotations

import socket

import pytest

from shortfin_apps.llm.serving.server.config import ServerConfigError
from shortfin_apps.llm.tools.cluster.ports import LOOPBACK, Wanted, free_ports

ANY = Wanted(LOOPBACK, 0, "--port")


def test_zero_takes_ports_that_differ() -> None:
    ports = free_ports([ANY] * 20)
    assert len({*ports}) == 20
    assert min(ports) > 0


def test_a_port_in_use_names_the_flag() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerConfigError, match=rf"port {port} \(.* in use\).*`--metrics-port`"):
            free_ports([Wanted(LOOPBACK, port, "--metrics-port")])


def test_a_host_that_is_not_ours_is_one_sentence() -> None:
    with pytest.raises(ServerConfigError, match=r"cannot listen on no\.such\.host\.invalid, port 0"):
        free_ports([Wanted("no.such.host.invalid", 0, "--port")])


def test_a_given_port_is_kept_and_left_free() -> None:
    (port,) = free_ports([ANY])
    assert free_ports([Wanted(LOOPBACK, port, "--port")]) == [port]
    assert free_ports([Wanted(LOOPBACK, port, "--port")]) == [port]
