"""Runs of one transport each: a reader in this process, producers and followers in long-lived others."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from ring_peers import queues
from ring_transports import ARRAYS, AsyncrlRing, Transport, arrays_of, make_sample

from asyncrl.types import Sample

DEPTH = 64
WARM_UP = 0.2  # share of the records before the clock starts
ANSWER_S = 180.0  # a process that does not answer for so long hangs


@dataclass(frozen=True)
class Setting:
    transport: type[Transport]
    payload_bytes: int
    producers: int = 1
    readers: int = 1
    touch: str = "light"


# ---- The processes at the other end ------------------------------------------------------------------


def produce(transport: Transport, pipe: Connection, payload: int, count: int, hz: float) -> None:
    transport.connect_producer()
    sample = make_sample(payload)
    pipe.send("ready")
    pipe.recv()
    start = time.perf_counter()
    if transport.batch > 1:
        put_batches(transport, sample, count)
        count = 0
    for seq in range(count):
        object.__setattr__(sample, "group_id", seq)
        if hz:
            if (pause := start + seq / hz - time.perf_counter()) > 0:
                time.sleep(pause)
            object.__setattr__(sample, "reward", float(time.perf_counter_ns()))
        transport.put(sample)
    pipe.recv()


def put_batches(transport: Transport, sample: Sample, count: int) -> None:
    samples = [dataclasses.replace(sample) for _ in range(transport.batch)]
    for first in range(0, count, transport.batch):
        for seq, each in enumerate(samples, first):
            object.__setattr__(each, "group_id", seq)
        transport.put_many(samples)


def follow(transport: AsyncrlRing, pipe: Connection, rank: int, size: int, count: int) -> None:
    """One of the other ranks of the group."""
    transport.connect_reader(rank, size)
    pipe.send("ready")
    pipe.recv()
    for _ in range(count // transport.batch):
        read(transport, full=False)
    pipe.recv()


def worker(pipe: Connection, handles: Mapping[str, Any]) -> None:
    """Lives through the whole benchmark, so that no run pays for starting Python."""
    while (task := pipe.recv()) is not None:
        if isinstance(task, str):
            connect_ray(task)  # before anything that refers to an actor can be received
            continue
        role, transport, arguments = task
        transport.inherit(handles)
        (produce if role == "produce" else follow)(transport, pipe, *arguments)
        del transport
        pipe.send("done")


def connect_ray(address: str) -> None:
    import ray

    if not ray.is_initialized():
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)


# ---- One run -------------------------------------------------------------------------------------------


def read(transport: Transport, full: bool) -> None:
    """Take what one get gives, touch it, give it back."""
    if transport.batch == 1:
        touch(transport.get()[0], full)
    else:
        for arrays, _, _ in transport.get_many():
            touch(arrays, full)
        del arrays
    transport.release()


def touch(arrays: dict[str, np.ndarray], full: bool) -> float:
    ids, logprobs = arrays["token_ids"], arrays["behav_logprobs"]
    if full:
        return sum(float(arrays[name].sum()) for name, _ in ARRAYS)
    return float(ids[0]) + float(ids[-1]) + float(logprobs[-1])


class Bench:
    """The other processes, and Ray where a transport needs it."""

    def __init__(self, transports: set[type[Transport]]) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.handles = queues(self.context, DEPTH, transports)
        self.workers: list[Connection] = []
        self.processes: list[Any] = []
        self.ray_address: str | None = None

    def start_ray(self) -> None:
        import ray

        ray.init(
            num_cpus=4,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": ":".join(filter(None, sys.path))}},
        )
        self.ray_address = ray.get_runtime_context().gcs_address

    def run(self, setting: Setting, count: int, hz: float = 0.0) -> tuple[float, list[float]]:
        """Samples per second after the warm-up, and at a pace every latency in microseconds."""
        transport = setting.transport()
        transport.setup(setting.payload_bytes, DEPTH)
        try:
            with deadline(f"{setting}: {count} records"):
                return self._run(setting, transport, count, hz)
        finally:
            transport.close()

    def _run(
        self, setting: Setting, transport: Transport, count: int, hz: float
    ) -> tuple[float, list[float]]:
        transport.inherit(self.handles)
        arguments = (setting.payload_bytes, count // setting.producers, hz)
        total = count // setting.producers * setting.producers
        pipes = [self._start(transport, "produce", arguments, i) for i in range(setting.producers)]
        if setting.readers == 1:
            transport.connect_reader()
        else:
            assert isinstance(transport, AsyncrlRing)
            transport.connect_reader(0, setting.readers)
            for rank in range(1, setting.readers):
                index = setting.producers + rank - 1
                pipes.append(self._start(transport, "follow", (rank, setting.readers, total), index))
        for pipe in pipes:
            expect(pipe, "ready", setting)
        for pipe in pipes:
            pipe.send("go")
        result = self._read(transport, total, setting.touch == "full", paced=hz > 0)
        for pipe in pipes:
            pipe.send("end")
        for pipe in pipes:
            expect(pipe, "done", setting)
        return result

    def _read(self, transport: Transport, total: int, full: bool, paced: bool) -> tuple[float, list[float]]:
        latencies: list[float] = []
        warm = max(1, int(total * WARM_UP))
        began = 0.0
        for number in range(0, total, transport.batch):
            if paced:
                latencies.append(self._latency(transport))
            else:
                read(transport, full)
            if began == 0.0 and number + transport.batch >= warm:
                warm, began = number + transport.batch, time.perf_counter()
        return (total - warm) / (time.perf_counter() - began), latencies[warm:]

    def _latency(self, transport: Transport) -> float:
        """Microseconds from put to get of one sample."""
        arrays, _, sent = transport.get()
        latency = (time.perf_counter_ns() - sent) / 1e3
        touch(arrays, full=False)
        del arrays
        transport.release()
        return latency

    def _start(self, transport: Transport, role: str, arguments: tuple[Any, ...], index: int) -> Connection:
        while len(self.workers) <= index:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=worker, args=(theirs, self.handles), daemon=True)
            process.start()
            self.processes.append(process)
            self.workers.append(ours)
        if transport.needs_ray:
            self.workers[index].send(self.ray_address)
        self.workers[index].send((role, transport, arguments))
        return self.workers[index]

    def close(self) -> None:
        for pipe in self.workers:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
        if self.ray_address is not None:
            import ray

            ray.shutdown()


@contextlib.contextmanager
def deadline(what: str) -> Iterator[None]:
    """Raises TimeoutError in the middle of whatever waits for too long: a peer may have lost a record."""

    def too_long(signum: int, frame: object) -> None:
        raise TimeoutError(f"{what}: not done within {ANSWER_S:.0f} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, ANSWER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def expect(pipe: Connection, answer: str, setting: Setting) -> None:
    if not pipe.poll(ANSWER_S):
        raise TimeoutError(f"{setting}: no {answer!r} from a process within {ANSWER_S:.0f} s")
    received = pipe.recv()
    assert received == answer, received


def copy_bound(payload_bytes: int, seconds: float) -> float:
    """Samples per second of numpy copying the four arrays into warm shared memory, 64 records in turn."""
    sources = list(arrays_of(make_sample(payload_bytes)).values())
    stride = sum(-(-source.nbytes // 64) * 64 for source in sources)
    memory = np.frombuffer(mmap.mmap(-1, stride * DEPTH), np.uint8)
    memory[:] = 1
    records = []
    for index in range(DEPTH):
        at, views = index * stride, []
        for source in sources:
            views.append(memory[at : at + source.nbytes].view(source.dtype))
            at += -(-source.nbytes // 64) * 64
        records.append(views)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for views in records:
            for view, source in zip(views, sources, strict=True):
                view[:] = source
        count += DEPTH
    return count / (time.perf_counter() - began)
