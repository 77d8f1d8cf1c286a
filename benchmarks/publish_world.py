"""The eight processes of the publication benchmark: four of a trainer, two each of two engines.

    parent --order (method, version)--> all processes --barrier--> the method --barrier--> verify, report

The parent imports everything once and forks; it starts no thread and opens no group itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from asyncrl.engines.ports import free_ports
from asyncrl.weights.geometry import ModelGeometry
from asyncrl.weights.layout import hf_tensors

TP, PP, NUM_ENGINES, ENGINE_TP = 2, 2, 2, 2
NUM_TRAINERS, NUM_ENGINE_RANKS = TP * PP, NUM_ENGINES * ENGINE_TP
TIMEOUT_S = 600.0
DTYPE = torch.bfloat16


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelGeometry:
    return ModelGeometry(
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        tied_embeddings=True,
        qk_norm=False,
        attention_bias=False,
        rope_theta=10000.0,
        rope_scaling=None,
        norm_eps=1e-5,
        max_position=2048,
    )


MODELS = {
    "135M": llama(30, 576, 8, 4, 1536, 49152),  # SmolLM2's, with heads that TP2 divides
    "1B": llama(16, 2048, 32, 8, 8192, 128256),  # Llama 3.2 1B
}


@dataclass(frozen=True)
class Report:
    """What one rank says after one publication; times by CLOCK_MONOTONIC, which all processes share."""

    began: float
    ended: float
    bytes_sent: int
    bytes_received: int
    extra_bytes: int
    pause_s: float
    mismatch: str


@dataclass(frozen=True)
class Outcome:
    """One publication, over all ranks."""

    seconds: float
    bytes_sent_max: int
    bytes_received_max: int
    extra_bytes_max: int
    pause_s: float


@dataclass(frozen=True)
class Setup:
    """What every process is born with; ``ports``: trainer, engines, weight groups, broadcasts, link."""

    geometry: ModelGeometry
    bucket_bytes: int
    ports: tuple[int, ...]
    barrier: Any
    directory: Path


class World:
    """The processes, from the first publication to the last."""

    def __init__(self, model: str, bucket_bytes: int) -> None:
        from publish_ranks import run_engine, run_trainer

        geometry = MODELS[model]
        self.num_parameters = sum(torch.Size(shape).numel() for shape in hf_tensors(geometry).values())
        context = multiprocessing.get_context("fork")
        self._directory = tempfile.TemporaryDirectory(prefix="asyncrl-bench-")
        barrier = context.Barrier(NUM_TRAINERS + NUM_ENGINE_RANKS, timeout=TIMEOUT_S)
        ports = tuple(free_ports(2 + 2 * NUM_ENGINES + PP))
        setup = Setup(geometry, bucket_bytes, ports, barrier, Path(self._directory.name))
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        roles = [(run_trainer, (rank,)) for rank in range(NUM_TRAINERS)]
        roles += [(run_engine, (e, rank)) for e in range(NUM_ENGINES) for rank in range(ENGINE_TP)]
        for target, place in roles:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(setup, theirs, *place), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            self._receive(pipe)  # connected

    def publish(self, method: str, version: int) -> Outcome:
        """Publish with one method and have it verified.

        Raises:
            RuntimeError: an engine rank holds something else than the version, or a process died.
        """
        for pipe in self._pipes:
            pipe.send((method, version))
        reports: list[Report] = [self._receive(pipe) for pipe in self._pipes]
        wrong = [report.mismatch for report in reports if report.mismatch]
        if wrong:
            raise RuntimeError(f"{method}, version {version}: {wrong[0]}")
        return Outcome(
            seconds=max(r.ended for r in reports) - min(r.began for r in reports),
            bytes_sent_max=max(r.bytes_sent for r in reports),
            bytes_received_max=max(r.bytes_received for r in reports),
            extra_bytes_max=max(r.extra_bytes for r in reports),
            pause_s=max(r.pause_s for r in reports),
        )

    def _receive(self, pipe: Connection) -> Any:
        if not pipe.poll(TIMEOUT_S):
            raise RuntimeError(f"rank {self._pipes.index(pipe)} did not answer within {TIMEOUT_S:.0f} s")
        return pipe.recv()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()
        self._directory.cleanup()


class Meter:
    """Time and the growth of resident memory between construction and `report`."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        self._resident = _status_bytes("VmRSS")
        self.began = time.monotonic()
        self.bytes_sent = self.bytes_received = 0
        self.kept_bytes = 0  # of second copies, which stay when it is over
        self.pause_s = 0.0

    def report(self) -> Report:
        ended = time.monotonic()
        extra = max(0, _status_bytes("VmHWM") - self._resident) + self.kept_bytes
        return Report(self.began, ended, self.bytes_sent, self.bytes_received, extra, self.pause_s, "")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def expected(name: str, version: int, rows: slice, cols: slice) -> torch.Tensor:
    """A rectangle of a Hugging Face tensor in a version, bfloat16: every element's bits by its place."""
    seed = (sum(name.encode()) * 7919 + version * 104729) % 32768
    row = (torch.arange(rows.start, rows.stop) * 40503 + seed).to(torch.int16)
    col = (torch.arange(cols.start, cols.stop) * 30011).to(torch.int16)
    return (row[:, None] + col[None, :]).view(DTYPE)


def set_up_rank() -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
