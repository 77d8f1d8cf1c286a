"""The ring against what one would use instead, and against the bound of copying a sample once.

    python benchmarks/ring.py [--quick] [--json FILE] [--plot FILE.png] [--rounds N]

All transports take turns in every round, so that what else the machine does hits all of them; the table
shows medians over rounds, and ratios to the copy bound taken within a round. "light" touches the ends of two
arrays; "full" sums all of them: then memory bandwidth decides, and the lead shrinks. Latency is from put to
get at a paced 200 samples/s.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

import ring_peers as peers

DEPTH = 64
WARM_UP = 0.2  # share of the records before the clock starts
PACE_HZ = 200.0
PACED_COUNT = 256
PAYLOADS = (4096, 65536, 1 << 20)
TRANSPORTS = (
    peers.AsyncrlRing,
    peers.AsyncrlBatches,
    peers.Iceoryx2,
    peers.ZmqPickle5,
    peers.ZmqMsgpack,
    peers.MpQueue,
    peers.TorchQueue,
    peers.RayDeque,
    peers.RayQueue,
)
QUICK_TRANSPORTS = TRANSPORTS[:4] + (peers.MpQueue, peers.RayDeque)


@dataclass(frozen=True)
class Setting:
    transport: type[peers.Transport]
    payload_bytes: int
    producers: int = 1
    readers: int = 1
    touch: str = "light"


@dataclass(frozen=True)
class Row:
    """One line of the JSON file: medians over the runs."""

    transport: str
    payload_bytes: int
    producers: int
    readers: int
    touch: str
    samples_per_s: float
    of_copy_bound: float
    p50_us: float | None
    p99_us: float | None
    runs: int


# ---- The processes at the other end ------------------------------------------------------------------


def produce(transport: peers.Transport, pipe: Connection, payload: int, count: int, hz: float) -> None:
    transport.connect_producer()
    sample = peers.make_sample(payload)
    pipe.send("ready")
    pipe.recv()
    start = time.perf_counter()
    for seq in range(count):
        if hz and (pause := start + seq / hz - time.perf_counter()) > 0:
            time.sleep(pause)
        transport.put(replace_meta(sample, seq, time.perf_counter_ns()))
    transport.flush()
    pipe.recv()


def replace_meta(sample: Any, seq: int, now_ns: int) -> Any:
    object.__setattr__(sample, "group_id", seq)
    object.__setattr__(sample, "reward", float(now_ns))
    return sample


def follow(transport: peers.AsyncrlRing, pipe: Connection, rank: int, size: int, count: int) -> None:
    """One of the other ranks of the group."""
    transport.connect_reader(rank, size)
    pipe.send("ready")
    pipe.recv()
    for _ in range(count):
        touch(transport.get()[0], full=False)
        transport.release()
    pipe.recv()


def worker(pipe: Connection) -> None:
    """Lives through the whole benchmark, so that no run pays for starting Python."""
    while (task := pipe.recv()) is not None:
        if isinstance(task, str):
            connect_ray(task)  # before anything that refers to an actor can be received
            continue
        role, transport, arguments = task
        (produce if role == "produce" else follow)(transport, pipe, *arguments)
        del transport
        pipe.send("done")


def inherited_producer(transport: peers.Transport, pipe: Connection, arguments: tuple[Any, ...]) -> None:
    produce(transport, pipe, *arguments)
    pipe.send("done")


def connect_ray(address: str) -> None:
    import ray

    if not ray.is_initialized():
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)


# ---- One run -------------------------------------------------------------------------------------------


def touch(arrays: dict[str, np.ndarray], full: bool) -> float:
    ids, logprobs = arrays["token_ids"], arrays["behav_logprobs"]
    if full:
        return sum(float(array.sum()) for array in arrays.values())
    return float(ids[0]) + float(ids[-1]) + float(logprobs[-1])


class Bench:
    def __init__(self) -> None:
        self.context = multiprocessing.get_context("spawn")
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
        """Samples per second after the warm-up, and every latency in microseconds."""
        transport = setting.transport()
        transport.setup(setting.payload_bytes, DEPTH)
        arguments = (setting.payload_bytes, count // setting.producers, hz)
        total = count // setting.producers * setting.producers
        pipes = [self._start(transport, "produce", arguments, i) for i in range(setting.producers)]
        if setting.readers == 1:
            transport.connect_reader()
        else:
            assert isinstance(transport, peers.AsyncrlRing)
            transport.connect_reader(0, setting.readers)
            for rank in range(1, setting.readers):
                index = setting.producers + rank - 1
                pipes.append(self._start(transport, "follow", (rank, setting.readers, total), index))
        for pipe in pipes:
            assert pipe.recv() == "ready"
        for pipe in pipes:
            pipe.send("go")
        result = self._read(transport, total, setting.touch == "full")
        for pipe in pipes:
            pipe.send("end")
        for pipe in pipes:
            assert pipe.recv() == "done"
        transport.close()
        return result

    def _read(self, transport: peers.Transport, total: int, full: bool) -> tuple[float, list[float]]:
        latencies, warm = [], max(1, int(total * WARM_UP))
        began = 0.0
        for number in range(total):
            arrays, _, sent = transport.get()
            latencies.append((time.perf_counter_ns() - sent) / 1e3)
            touch(arrays, full)
            del arrays
            transport.release()
            if number + 1 == warm:
                began = time.perf_counter()
        return (total - warm) / (time.perf_counter() - began), latencies[warm:]

    def _start(
        self, transport: peers.Transport, role: str, arguments: tuple[Any, ...], index: int
    ) -> Connection:
        if transport.inherited:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=inherited_producer, args=(transport, theirs, arguments))
            process.start()
            self.processes.append(process)
            return ours
        while len(self.workers) <= index:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=worker, args=(theirs,), daemon=True)
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


def copy_bound(payload_bytes: int, seconds: float) -> float:
    """Samples per second of numpy copying the four arrays into warm shared memory, 64 records in turn."""
    sources = list(peers.arrays_of(peers.make_sample(payload_bytes)).values())
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


# ---- The benchmark -------------------------------------------------------------------------------------


def settings_of(quick: bool) -> list[Setting]:
    if quick:
        return [Setting(transport, payload) for payload in PAYLOADS for transport in QUICK_TRANSPORTS]
    settings = []
    for payload in PAYLOADS:
        for transport in TRANSPORTS:
            for producers in (1, 2):
                for how in ("light", "full"):
                    settings.append(Setting(transport, payload, producers, 1, how))
        settings.append(Setting(peers.AsyncrlRing, payload, 1, 4))
        settings.append(Setting(peers.AsyncrlBatches, payload, 1, 4))
    return settings


def measure(settings: list[Setting], rounds: int, seconds: float, latency: bool) -> list[Row]:
    bench = Bench()
    if any(setting.transport.needs_ray for setting in settings):
        bench.start_ray()
    rates: dict[Setting, list[float]] = defaultdict(list)
    ratios: dict[Setting, list[float]] = defaultdict(list)
    times: dict[Setting, list[float]] = defaultdict(list)
    counts: dict[Setting, int] = {}
    for number in range(rounds):
        bounds = {
            payload: copy_bound(payload, seconds / 5) for payload in {s.payload_bytes for s in settings}
        }
        for setting in settings:
            if setting not in counts:
                counts[setting] = plan_count(bench.run(setting, 64)[0], seconds)
            rate, _ = bench.run(setting, counts[setting])
            counts[setting] = plan_count(rate, seconds)
            rates[setting].append(rate)
            ratios[setting].append(rate / bounds[setting.payload_bytes])
            if (
                latency
                and setting.transport.paced
                and setting.producers == 1
                and setting.touch == "light"
                and number < 3
            ):
                times[setting] += bench.run(setting, PACED_COUNT, PACE_HZ)[1]
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    bench.close()
    return [summarise(setting, rates[setting], ratios[setting], times[setting]) for setting in settings]


def plan_count(rate: float, seconds: float) -> int:
    return int(min(100_000, max(128, rate * seconds))) // 64 * 64


def summarise(setting: Setting, rates: list[float], ratios: list[float], times: list[float]) -> Row:
    return Row(
        transport=setting.transport.name,
        payload_bytes=setting.payload_bytes,
        producers=setting.producers,
        readers=setting.readers,
        touch=setting.touch,
        samples_per_s=round(statistics.median(rates), 1),
        of_copy_bound=round(statistics.median(ratios), 4),
        p50_us=round(float(np.percentile(times, 50)), 1) if times else None,
        p99_us=round(float(np.percentile(times, 99)), 1) if times else None,
        runs=len(rates),
    )


def table(rows: list[Row]) -> str:
    ours = {
        (r.payload_bytes, r.producers, r.touch): r
        for r in rows
        if r.transport == "asyncrl" and r.readers == 1
    }
    head = f"{'transport':<30}{'bytes':>9}{'prod':>5}{'read':>5} {'touch':<6}{'samples/s':>11}{'of copy':>9}"
    lines = [head + f"{'p50 us':>9}{'p99 us':>9}{'asyncrl is':>12}"]
    for row in rows:
        reference = ours[row.payload_bytes, row.producers, row.touch]
        ratio = f"{reference.samples_per_s / row.samples_per_s:.1f}x" if row is not reference else ""
        p50, p99 = (f"{value:.0f}" if value is not None else "" for value in (row.p50_us, row.p99_us))
        lines.append(
            f"{row.transport:<30}{row.payload_bytes:>9}{row.producers:>5}{row.readers:>5} {row.touch:<6}"
            f"{row.samples_per_s:>11.0f}{row.of_copy_bound:>9.3f}{p50:>9}{p99:>9}{ratio:>12}"
        )
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    touches = [how for how in ("light", "full") if any(row.touch == how for row in rows)]
    figure, axes = pyplot.subplots(1, len(touches), figsize=(7 * len(touches), 5), squeeze=False, sharey=True)
    for axis, how in zip(axes[0], touches, strict=True):
        for name in dict.fromkeys(row.transport for row in rows):
            points = [r for r in rows if (r.transport, r.touch, r.producers, r.readers) == (name, how, 1, 1)]
            axis.loglog(
                [r.payload_bytes for r in points], [r.samples_per_s for r in points], marker="o", label=name
            )
        axis.set(xlabel="bytes per sample", ylabel="samples per second", title=f"one producer, {how} reading")
        axis.grid(True, which="both", alpha=0.3)
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer transports, one producer, under 50 s")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="write a plot to this file")
    parser.add_argument("--rounds", type=int, help="default 5, quick 2")
    args = parser.parse_args()
    rounds = args.rounds or (2 if args.quick else 5)
    rows = measure(settings_of(args.quick), rounds, 0.15 if args.quick else 0.5, latency=not args.quick)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
