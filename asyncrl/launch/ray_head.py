"""A private Ray cluster of one node for one run: loopback only, with a token, gone when the run is.

Ray rewrites 127.0.0.1 to the host's outward address, so the node takes another address of the loopback
network. The session directory is short (unix socket paths end at 107 bytes) and removed by the warden.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ray

from asyncrl.engines.ports import free_ports
from asyncrl.launch.child import Child

NODE_ADDRESS = "127.0.0.2"
NAMESPACE = "asyncrl"
ATTEMPTS = 3
OBJECT_STORE_BYTES = 80_000_000  # actors exchange short JSON strings only


class RayError(RuntimeError):
    """Ray did not start."""


@dataclass(frozen=True)
class RayHead:
    child: Child
    port: int

    @property
    def address(self) -> str:
        return f"{NODE_ADDRESS}:{self.port}"


def start_ray(log: Path, num_cpus: int, timeout_s: float, on_spawn: Callable[[RayHead], None]) -> RayHead:
    """Start a head node under a warden and connect this process to it as the driver.

    `asyncrl.launch.ray_token.protect_ray` comes before, and before Ray is imported. A port that was free may
    be taken before Ray binds it: then the whole start is tried again. ``on_spawn`` is told of every head node
    before it is waited for, so that whoever interrupts the wait can end it.

    Raises:
        RayError: it ended or did not answer within ``timeout_s`` seconds, each time.
    """
    for attempt in range(1, ATTEMPTS + 1):
        head = _spawn(log, num_cpus)
        on_spawn(head)
        try:
            _wait_for_port(head, timeout_s)
            _connect(head)
        except RayError:
            head.child.end(5.0)
            if attempt == ATTEMPTS:
                raise
        else:
            return head
    raise AssertionError("unreachable")


def _spawn(log: Path, num_cpus: int) -> RayHead:
    port, client_port = free_ports(2)
    session = Path(tempfile.mkdtemp(prefix="arl-"))
    child = Child(
        "ray",
        [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"]
        + [f"--node-ip-address={NODE_ADDRESS}", f"--port={port}", f"--ray-client-server-port={client_port}"]
        + ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        + ["--include-dashboard=false", "--include-log-monitor=false", "--disable-usage-stats"]
        + [f"--num-cpus={num_cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={session}"],
        log=log,
        grace_s=1.5,
        remove=[session],
    )
    return RayHead(child, port)


def _connect(head: RayHead) -> None:
    try:
        ray.init(
            address=head.address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address=NODE_ADDRESS,
        )
    except ConnectionError as error:
        raise RayError(f"ray at {head.address} does not answer ({error}); see {head.child.log}") from error


def _wait_for_port(head: RayHead, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while head.child.exit_code() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex((NODE_ADDRESS, head.port)) == 0:
                return
        time.sleep(0.1)
    code = head.child.exit_code()
    what = f"ended with status {code}" if code is not None else f"did not answer within {timeout_s:.0f} s"
    raise RayError(f"ray {what}; see {head.child.log}")
