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
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

import ring_peers as peers
from ring_runs import Bench, Setting, copy_bound
from ring_transports import AsyncrlBatches, AsyncrlRing

PACE_HZ = 200.0
PACED_COUNT = 256
PACED_ROUNDS = 2
PAYLOADS = (4096, 65536, 1 << 20)
TRANSPORTS = (
    AsyncrlRing,
    AsyncrlBatches,
    peers.Iceoryx2,
    peers.ZmqPickle5,
    peers.ZmqMsgpack,
    peers.MpQueue,
    peers.TorchQueue,
    peers.VllmMessageQueue,
    peers.RayDeque,
    peers.RayQueue,
)
QUICK_TRANSPORTS = (*TRANSPORTS[:4], peers.MpQueue, peers.RayDeque)
QUICK_FULL_READ = (AsyncrlRing, peers.Iceoryx2, peers.ZmqPickle5)


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


def settings_of(quick: bool) -> list[Setting]:
    if quick:
        light = [Setting(transport, payload) for payload in PAYLOADS for transport in QUICK_TRANSPORTS]
        full = [Setting(each, payload, touch="full") for payload in PAYLOADS for each in QUICK_FULL_READ]
        return light + full
    settings = []
    for payload in PAYLOADS:
        for transport in TRANSPORTS:
            for producers in range(1, transport.max_producers + 1):
                for how in ("light", "full"):
                    settings.append(Setting(transport, payload, producers, 1, how))
        settings.append(Setting(AsyncrlRing, payload, 1, 4))
        settings.append(Setting(AsyncrlBatches, payload, 1, 4))
    return settings


def measure(settings: list[Setting], rounds: int, seconds: float, latency: bool) -> list[Row]:
    bench = Bench({setting.transport for setting in settings})
    if any(setting.transport.needs_ray for setting in settings):
        bench.start_ray()
    rates: dict[Setting, list[float]] = defaultdict(list)
    ratios: dict[Setting, list[float]] = defaultdict(list)
    times: dict[Setting, list[float]] = defaultdict(list)
    counts: dict[Setting, int] = {}
    for number in range(rounds):
        for setting in settings:
            if setting not in counts:
                counts[setting] = plan_count(bench.run(setting, 64)[0], seconds)
            bound = copy_bound(setting.payload_bytes, seconds / 5)
            rate, _ = bench.run(setting, counts[setting])
            counts[setting] = plan_count(rate, seconds)
            rates[setting].append(rate)
            ratios[setting].append(rate / bound)
            if latency and number < PACED_ROUNDS and is_paced(setting):
                times[setting] += bench.run(setting, PACED_COUNT, PACE_HZ)[1]
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    bench.close()
    return [summarise(setting, rates[setting], ratios[setting], times[setting]) for setting in settings]


def is_paced(setting: Setting) -> bool:
    return setting.transport.paced and setting.producers == 1 and setting.touch == "light"


def plan_count(rate: float, seconds: float) -> int:
    return int(min(100_000, max(64, rate * seconds))) // 64 * 64


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
    parser.add_argument("--rounds", type=int, help="default 5, quick 3")
    args = parser.parse_args()
    rounds = args.rounds or (3 if args.quick else 5)
    rows = measure(settings_of(args.quick), rounds, 0.12 if args.quick else 0.5, latency=not args.quick)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
