"""Packing and unpacking buckets on the CPU, digest included, against memcpy and torch on the same memory.

    python benchmarks/pack.py [--quick] [--json FILE] [--mib 256] [--gap 1 3] [--rounds 9] [--threads 1]

A bucket of ``--mib`` MiB, larger than any cache, and a parameter whose rows lie ``--gap`` row lengths apart:
3 where one rank of TP 4 packs a quarter of each row; or follow each other: "contiguous". In every round
memcpy, torch, pack and unpack take turns, so that what else the machine does hits all of them; the table
shows medians over rounds, the ratios taken within a round.

* memcpy moves as many bytes as the copy, without gaps: for a cast the mean of what it reads and what it
  writes. A yardstick, not a bound: where memory is what one waits for, asking for it ahead can beat it.
* torch copies the same rows between the same places by ``copy_``, without a digest: what one would use
  instead.

Gates: 0.8 of memcpy for rows of at least 4 KiB, 0.5 for 512 bytes; the exit status is 1 where one is missed
(copies, one thread).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import asyncrl._C as _C

OPS = {"float32": (4, 4, 4), "bfloat16": (2, 2, 2), "float32 as bfloat16": (5, 4, 2)}
"""Number of the operation, bytes of an element in the parameter and on the wire."""
DTYPE_OF_WIDTH = {4: torch.float32, 2: torch.bfloat16}
ROW_BYTES = (128, 512, 4096, 6000, 16384, 0)  # in the parameter; 0: contiguous; 6000 ends within a line
LIBC = ctypes.CDLL(None)
LIBC.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class Row:
    """One line of the table: medians over the rounds."""

    op: str
    direction: str  # pack or unpack
    row_bytes: int  # 0: contiguous
    gap: int  # between rows of the parameter, in rows
    threads: int
    gb_per_s: float  # (bytes read + bytes written) / 2
    memcpy_gb_per_s: float
    of_memcpy: float
    of_torch: float
    gate: float  # 0: none

    @property
    def is_good(self) -> bool:
        return self.of_memcpy >= self.gate


def gate_of(op: str, row_bytes: int, threads: int) -> float:
    if threads > 1 or "as" in op:
        return 0.0
    return 0.8 if row_bytes == 0 or row_bytes >= 4096 else 0.5 if row_bytes == 512 else 0.0


def seconds_of(action: Callable[[], object], threads: int) -> float:
    """Processor time of one thread, so that waiting for the processor does not count; else the clock's."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    started = clock()
    action()
    return clock() - started


def measure(
    op: str, row_bytes: int, memory: tuple[torch.Tensor, torch.Tensor], gap: int, rounds: int, threads: int
) -> list[Row]:
    """Both directions of one operation; ``memory`` is the parameter's and the bucket's, uint8."""
    parameter, wire = memory
    number, local_width, wire_width = OPS[op]
    wire_bytes = wire.numel() * wire_width // local_width
    elements = wire_bytes // wire_width
    cols = row_bytes // local_width if row_bytes else elements
    rows, stride = elements // cols, (1 + gap) * cols
    table = array("q", [0, 0, stride, rows, cols, 0, 0, cols, 0, number])
    program = _C.CopyProgram(table, [parameter.numel()], wire_bytes, 1)
    workers = _C.CopyWorkers(threads) if threads > 1 else None
    digests = torch.zeros(1, dtype=torch.int64)
    moved = elements * (local_width + wire_width) // 2
    local, remote = parameter.data_ptr(), wire.data_ptr()
    rows_there = parameter.view(DTYPE_OF_WIDTH[local_width])[: rows * stride].view(rows, stride)[:, :cols]
    rows_here = wire.view(DTYPE_OF_WIDTH[wire_width])[: rows * cols].view(rows, cols)
    actions: dict[str, tuple[Callable[[], object], ...]] = {
        "pack": (
            lambda: program.pack([local], remote, digests.data_ptr(), workers),
            lambda: LIBC.memcpy(remote, local, moved),
            lambda: rows_here.copy_(rows_there),
        ),
        "unpack": (
            lambda: program.unpack([local], remote, digests.data_ptr(), workers),
            lambda: LIBC.memcpy(local, remote, moved),
            lambda: rows_there.copy_(rows_here),
        ),
    }
    times: dict[str, list[list[float]]] = {direction: [] for direction in actions}
    for _ in range(rounds):
        for direction, turns in actions.items():
            times[direction].append([seconds_of(turn, threads) for turn in turns])
    return [
        Row(
            op,
            direction,
            row_bytes,
            gap,
            threads,
            moved / statistics.median(own for own, _, _ in taken) / 1e9,
            moved / statistics.median(copy for _, copy, _ in taken) / 1e9,
            statistics.median(copy / own for own, copy, _ in taken),
            statistics.median(peer / own for own, _, peer in taken),
            gate_of(op, row_bytes, threads),
        )
        for direction, taken in times.items()
    ]


def line_of(row: Row) -> str:
    size = "contiguous" if row.row_bytes == 0 else f"{row.row_bytes} B"
    gate = f"{row.gate:.1f}" if row.gate else "-"
    verdict = "ok" if row.is_good else "missed"
    numbers = f"{row.gb_per_s:.1f} | {row.memcpy_gb_per_s:.1f} | {row.of_memcpy:.2f} | {row.of_torch:.1f}x"
    return f"| {row.op} | {row.direction} | {size} | {row.gap} | {numbers} | {gate} | {verdict} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MiB and 3 rounds")
    parser.add_argument("--json", type=Path, help="write the rows of the table here")
    parser.add_argument("--mib", type=int, default=256, help="size of the bucket")
    parser.add_argument("--gap", type=int, nargs="+", default=[1, 3], help="of a parameter's rows, in rows")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.quick:
        options.mib, options.rounds = 64, 3
    num_bytes = options.mib << 20
    sizes = ((1 + max(options.gap)) * num_bytes, num_bytes)
    memory = (torch.ones(sizes[0], dtype=torch.uint8), torch.ones(sizes[1], dtype=torch.uint8))
    print("| elements | direction | rows | gap | GB/s | memcpy GB/s | of memcpy | torch | gate | verdict |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    torch.set_num_threads(options.threads)
    results: list[Row] = []
    shapes = [(row_bytes, gap) for row_bytes in ROW_BYTES for gap in (options.gap if row_bytes else [0])]
    for op in OPS:
        for row_bytes, gap in shapes:
            for row in measure(op, row_bytes, memory, gap, options.rounds, options.threads):
                results.append(row)
                print(line_of(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in results], indent=1) + "\n")
    return 0 if all(row.is_good for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
