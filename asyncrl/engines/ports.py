"""Ports for servers that bind them only later, seconds or a minute after they were chosen.

They are drawn from below the ports that the kernel hands out by itself, for one of those would soon belong to
the next client of anything on the machine.
"""

from __future__ import annotations

import random
import socket

PORTS = (20_000, 32_000)
"""From, to: below Linux's ip_local_port_range, above the well-known ones."""


def free_ports(count: int, host: str = "") -> list[int]:
    """Distinct ports at which nobody listens; ``host`` "" means on every address."""
    probes: list[socket.socket] = []
    while len(probes) < count:
        probe = socket.socket()
        try:
            probe.bind((host, random.SystemRandom().randrange(*PORTS)))
        except OSError:  # taken: draw another
            probe.close()
            continue
        probes.append(probe)
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def free_port(host: str = "127.0.0.1") -> int:
    """One of `free_ports`."""
    return free_ports(1, host)[0]
