"""Publishing weights shard to shard, against gathering and broadcasting, and against a checkpoint on disk.

    python benchmarks/publish.py [--quick] [--json FILE] [--plot FILE.png] [--rounds N] [--bucket-mib N]

A trainer of TP2 x PP2 and two engines of TP2, eight processes that all methods share, over gloo on loopback;
bfloat16. Methods take turns in every round, and after each of them every engine rank compares all of its
parameters with what the version must be. Seconds are from the first process that starts to the last that is
done. Peak extra memory is measured (the kernel's high-water mark of resident memory), bytes are counted: a
broadcast as one copy out of its root and one into every receiver.

* asyncrl: each engine rank receives the bytes of its own shard, from the trainer.
* asyncrl, relay: each engine gets half of a bucket, and they exchange the halves, so that a trainer rank
  sends what one engine needs, however many there are. Loopback is one link for all: look at the bytes.
* asyncrl, staged: into a second copy, while the live weights would serve and the trainer would train on; the
  pause is the local copy alone. The second copies, of the shard on both sides, count as extra memory.
* gather + broadcast: the ranks of a pipeline stage gather every tensor whole, its first rank broadcasts it to
  all engine ranks, each keeps its slice (as slime and verl do).
* disk: the trainer writes a Hugging Face directory, engine ranks read their slices (safetensors, mapped).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from publish_world import MODELS, Outcome, World

METHODS = ("asyncrl", "asyncrl, relay", "asyncrl, staged", "gather + broadcast", "disk")


@dataclass(frozen=True)
class Row:
    """One line of the JSON file: medians over the rounds, of the worst rank each."""

    method: str
    parameters: int
    seconds: float
    bytes_sent_max: int
    bytes_received_max: int
    extra_bytes_max: int
    pause_s: float
    runs: int


def measure(model: str, rounds: int, bucket_bytes: int) -> list[Row]:
    outcomes: dict[str, list[Outcome]] = {method: [] for method in METHODS}
    with World(model, bucket_bytes) as world:
        version = 0
        for number in range(rounds + 1):  # the first round warms up: connections, page tables
            for method in METHODS:
                version += 1
                outcome = world.publish(method, version)
                if number > 0:
                    outcomes[method].append(outcome)
            print(f"{model}: round {number} of {rounds}", file=sys.stderr, flush=True)
        return [summarise(method, world.num_parameters, outcomes[method]) for method in METHODS]


def summarise(method: str, parameters: int, outcomes: list[Outcome]) -> Row:
    return Row(
        method=method,
        parameters=parameters,
        seconds=round(statistics.median(outcome.seconds for outcome in outcomes), 3),
        bytes_sent_max=max(outcome.bytes_sent_max for outcome in outcomes),
        bytes_received_max=max(outcome.bytes_received_max for outcome in outcomes),
        extra_bytes_max=int(statistics.median(outcome.extra_bytes_max for outcome in outcomes)),
        pause_s=round(statistics.median(outcome.pause_s for outcome in outcomes), 3),
        runs=len(outcomes),
    )


def table(rows: list[Row]) -> str:
    head = f"{'method':<20}{'parameters':>14}{'seconds':>9}{'sent max':>10}{'received':>10}"
    lines = [head + f"{'extra max':>11}{'pause s':>9}{'asyncrl is':>12}"]
    ours = {row.parameters: row for row in rows if row.method == "asyncrl"}
    for row in rows:
        faster = row.seconds / ours[row.parameters].seconds
        lines.append(
            f"{row.method:<20}{row.parameters:>14,}{row.seconds:>9.2f}{row.bytes_sent_max / 1e6:>8.0f}MB"
            f"{row.bytes_received_max / 1e6:>8.0f}MB{row.extra_bytes_max / 1e6:>9.0f}MB{row.pause_s:>9.2f}"
            + (f"{faster:>11.1f}x" if row.method != "asyncrl" else "")
        )
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    sizes = sorted({row.parameters for row in rows})
    for place, method in enumerate(METHODS):
        mine = [row for size in sizes for row in rows if (row.method, row.parameters) == (method, size)]
        at = [idx + 0.16 * place for idx in range(len(sizes))]
        axes[0].bar(at, [row.seconds for row in mine], 0.15, label=method)
        axes[1].bar(at, [row.extra_bytes_max / 1e6 for row in mine], 0.15, label=method)
    for axis, label in zip(axes, ("seconds per publication", "peak extra memory of a rank, MB"), strict=True):
        axis.set(ylabel=label, xticks=[idx + 0.32 for idx in range(len(sizes))])
        axis.set_xticklabels([f"{size / 1e9:.2f} B parameters" for size in sizes])
        axis.grid(True, axis="y", alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the small model, two rounds")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="write a plot to this file")
    parser.add_argument("--rounds", type=int, help="default 3, quick 2")
    parser.add_argument("--bucket-mib", type=int, default=32, help="largest message of all methods")
    args = parser.parse_args()
    rounds = args.rounds or (2 if args.quick else 3)
    rows: list[Row] = []
    for model in list(MODELS)[: 1 if args.quick else None]:
        rows += measure(model, rounds, args.bucket_mib << 20)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
