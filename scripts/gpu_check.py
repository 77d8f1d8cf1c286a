"""Every reshard kernel on a GPU: bits against plain torch, speed against a device copy.

    shapes x operations x grid sizes -> pack and unpack -> first mismatch, or GB/s and the share of a copy

GB/s counts the bytes read from parameters (pack) or written to them (unpack). Gates: contiguous copies reach
0.85 of a device copy, rows of 512 bytes 0.6, and eight blocks 200 GB/s.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import asyncrl._C as _C

OPS = {"copy4": (4, torch.float32, torch.float32), "copy2": (2, torch.bfloat16, torch.bfloat16)}
OPS |= {"cast": (5, torch.float32, torch.bfloat16)}
PAYLOAD_BYTES = 256 << 20
REPEATS = 20


@dataclass(frozen=True)
class Case:
    """Rows of ``row_bytes`` parameter bytes, ``gap`` elements apart, moved by at most ``max_blocks``."""

    name: str
    op: str
    row_bytes: int
    gap: int
    max_blocks: int
    gate_share: float = 0.0  # of a device copy
    gate_gbps: float = 0.0


CASES = [
    Case("contiguous", "copy4", 1 << 20, 0, 0, gate_share=0.85),
    Case("contiguous", "copy2", 1 << 20, 0, 0, gate_share=0.85),
    Case("contiguous, 8 blocks", "copy2", 1 << 20, 0, 8, gate_gbps=200.0),
    Case("rows of 4 KiB", "copy2", 4096, 64, 0),
    Case("rows of 512 B", "copy2", 512, 64, 0, gate_share=0.6),
    Case("rows of 512 B", "copy4", 512, 64, 0, gate_share=0.6),
    Case("rows of 90 B, unaligned", "copy2", 90, 3, 0),
    Case("to bfloat16, contiguous", "cast", 1 << 20, 0, 0),
    Case("to bfloat16, rows of 512 B", "cast", 512, 64, 0),
]


def seconds_of(action: Callable[[], object]) -> float:
    """Median time of one call on the current stream."""
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[REPEATS // 2]


def reference_digest(values: torch.Tensor) -> int:
    """Sum of (bits ^ low(key)) * (high(key) | 1) mod 2^64, where key = (position + 1) * golden ratio."""
    width = torch.int32 if values.element_size() == 4 else torch.int16
    mask = 0xFFFFFFFF if values.element_size() == 4 else 0xFFFF
    bits = values.flatten().view(width).to(torch.int64) & mask
    position = torch.arange(1, len(bits) + 1, device=bits.device)
    key = position * (0x9E3779B97F4A7C15 - (1 << 64))
    low, high = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    return int(((bits ^ low) * (high | 1)).sum())


def check(case: Case, copy_gbps: float) -> tuple[str, bool]:
    """One row of the table, and whether the case is right and fast enough."""
    op, local_dtype, wire_dtype = OPS[case.op]
    cols = case.row_bytes // local_dtype.itemsize
    rows, stride = PAYLOAD_BYTES // case.row_bytes, cols + case.gap
    parameter = torch.randn(rows, stride, device="cuda").to(local_dtype)
    payload = parameter[:, :cols]
    wire = torch.empty(rows * cols, dtype=wire_dtype, device="cuda")
    table = array("q", [0, 0, stride, rows, cols, 0, 0, cols, 0, op])
    sizes = [parameter.numel() * parameter.element_size()]
    program = _C.CopyProgram(table, sizes, wire.numel() * wire.element_size(), 1)
    on_device = _C.CudaProgram(program, case.max_blocks)
    digests = torch.zeros(2, dtype=torch.int64, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream

    def pack(digest_idx: int) -> None:
        on_device.pack([parameter.data_ptr()], wire.data_ptr(), digests[digest_idx:].data_ptr(), stream)

    target = torch.full_like(parameter, 3.0)

    def unpack(digest_idx: int) -> None:
        on_device.unpack([target.data_ptr()], wire.data_ptr(), digests[digest_idx:].data_ptr(), stream)

    expected = payload.to(wire_dtype).contiguous()
    pack(0)
    unpack(1)
    problems = []
    if not torch.equal(wire.view(rows, cols), expected):
        problems.append(f"pack differs first at element {int((wire != expected.flatten()).nonzero()[0])}")
    if not torch.equal(target[:, :cols], expected.to(local_dtype)) or not bool((target[:, cols:] == 3).all()):
        problems.append("unpack differs, or wrote between the rows")
    if digests.tolist() != [reference_digest(expected)] * 2:
        problems.append(f"digests {digests.tolist()}, expected {reference_digest(expected)}")
    pack_gbps = PAYLOAD_BYTES / seconds_of(lambda: pack(0)) / 1e9
    unpack_gbps = PAYLOAD_BYTES / seconds_of(lambda: unpack(1)) / 1e9
    slowest = min(pack_gbps, unpack_gbps)
    if slowest < case.gate_share * copy_gbps or slowest < case.gate_gbps:
        problems.append("too slow")
    numbers = f"{pack_gbps:.0f} | {unpack_gbps:.0f} | {slowest / copy_gbps:.2f}"
    gate = (
        f"{case.gate_share:.2f}"
        if case.gate_share
        else f"{case.gate_gbps:.0f} GB/s"
        if case.gate_gbps
        else "-"
    )
    return f"| {case.name} | {case.op} | {numbers} | {gate} | {'; '.join(problems) or 'ok'} |", not problems


def main(table_path: Path) -> int:
    source = torch.empty(PAYLOAD_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_gbps = PAYLOAD_BYTES / seconds_of(lambda: target.copy_(source)) / 1e9
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; device copy {copy_gbps:.0f} GB/s",
        "",
        "| case | operation | pack GB/s | unpack GB/s | of a copy | gate | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    results = [check(case, copy_gbps) for case in CASES]
    lines += [line for line, _ in results]
    text = "\n".join(lines) + "\n"
    table_path.write_text(text)
    print(text)
    return 0 if all(good for _, good in results) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
