"""Ports that are bound a minute after they were chosen."""

from __future__ import annotations

import socket

import pytest

from asyncrl.engines import ports
from asyncrl.engines.ports import PORTS, free_port, free_ports
from tests.free_pair import free_pair


def test_ports_are_not_among_those_that_the_kernel_hands_out() -> None:
    chosen = free_ports(50)
    assert len(set(chosen)) == 50
    assert all(PORTS[0] <= port < PORTS[1] for port in chosen)
    assert PORTS[1] <= 32_768  # where Linux's ip_local_port_range begins, unless somebody changed it


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = free_pair()
    monkeypatch.setattr(ports, "PORTS", (taken, taken + 2))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", taken))
        listener.listen()
        assert {free_port() for _ in range(20)} == {taken + 1}
