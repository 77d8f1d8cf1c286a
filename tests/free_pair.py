"""Two ports side by side for the tests that need them."""

from __future__ import annotations

import socket

from asyncrl.engines.ports import free_port


def free_pair() -> int:
    """A port that is free like the one after it; not among those that the kernel hands out by itself, which
    any client on the machine may be given next."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port + 1))
            except OSError:  # taken: draw another
                continue
        return port
