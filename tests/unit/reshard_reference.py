"""What one segment must do, in plain torch and numpy, and the program of one segment that should do it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch

import asyncrl._C as _C

OPS = {"copy1": 1, "copy2": 2, "copy4": 4, "f32_as_bf16": 5, "bf16_as_f32": 6, "copy8": 8}
OPS |= {"f32_as_fp8": 9, "bf16_as_fp8": 10, "transpose1": 17, "transpose2": 18, "transpose4": 20}
BLOCK = 128


def digest(wire: torch.Tensor, position: int = 0, position_stride: int | None = None) -> int:
    """Of a wire tensor [rows, cols] whose rows lie ``position_stride`` elements apart at the receiver.

    The sum, over the bytes b at byte p there, of (b << 8 (p mod 4)) * (2^32 + key(p div 4)) mod 2^64.
    """
    rows, cols = wire.shape
    width = wire.element_size()
    stride = cols if position_stride is None else position_stride
    plain = torch.empty(rows, cols, dtype=wire.dtype).copy_(wire)
    values = plain.view(torch.uint8).numpy().reshape(rows, cols * width).astype(np.uint64)
    start = (position + np.arange(rows, dtype=np.uint64) * np.uint64(stride)) * np.uint64(width)
    at = start[:, None] + np.arange(cols * width, dtype=np.uint64)[None, :]
    low = np.uint64(0xFFFFFFFF)
    unit = at // np.uint64(4)
    seed = ((unit & low) * np.uint64(2654435761) + (unit >> np.uint64(32)) * np.uint64(2246822519)) & low
    seed = (seed + np.uint64(668265263)) & low
    folded = seed ^ (seed >> np.uint64(16))
    square = (folded * (np.uint64(2) * folded + np.uint64(1))) & low
    key = square ^ (square >> np.uint64(15))
    shifted = values << (np.uint64(8) * (at % np.uint64(4)))
    return int((shifted * (key + np.uint64(1 << 32))).sum(dtype=np.uint64))


def quantised(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes of float8 e4m3fn, shaped like ``values``, and float32 scales, one per 128 x 128 block."""
    rows, cols = values.shape
    codes = torch.empty(rows, cols, dtype=torch.uint8)
    scales = torch.empty(-(-rows // BLOCK), -(-cols // BLOCK))
    for row in range(0, rows, BLOCK):
        for col in range(0, cols, BLOCK):
            block = values[row : row + BLOCK, col : col + BLOCK].float()
            scale = block.abs().amax() / 448
            scale = torch.where(scale == 0, torch.ones_like(scale), scale)
            number = (block / scale).clamp(-448, 448)
            code = number.to(torch.float8_e4m3fn).view(torch.uint8)
            codes[row : row + BLOCK, col : col + BLOCK] = torch.where(number.isnan(), 0x7F, code)
            scales[row // BLOCK, col // BLOCK] = scale
    return codes, scales


def first_mismatch(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Names the first element whose bits differ; an empty string where none does. Every NaN is the same."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    same = actual.contiguous().view(bits) == expected.contiguous().view(bits)
    if actual.is_floating_point():
        same |= actual.float().isnan() & expected.float().isnan()
    wrong = (~same).nonzero()
    if not len(wrong):
        return ""
    at = tuple(int(idx) for idx in wrong[0])
    return f"{len(wrong)} differ, first {list(at)}: {actual[at]!r}, expected {expected[at]!r}"


def packed_bytes(num_elements: int, width: int) -> int:
    """Bytes of a bucket of one segment up to the place of its scales."""
    return -(-num_elements * width // 4) * 4


@dataclass(frozen=True)
class OneSegment:
    """A program of one segment, which starts ``offset`` elements into a parameter of one dimension."""

    op: str
    rows: int
    cols: int
    stride: int
    offset: int = 0
    position: int = 0
    position_stride: int = 0

    def program(self, parameter: torch.Tensor, wire_bytes: int) -> _C.CopyProgram:
        fields = [0, self.offset, self.stride, self.rows, self.cols, 0, self.position]
        fields += [self.position_stride or self.cols, 0, OPS[self.op]]
        scales = None
        if self.op.endswith("fp8"):
            at = packed_bytes(self.rows * self.cols, 1)
            scales = array("q", [0, at, 0, -(-self.cols // BLOCK), 1])
        sizes = [parameter.numel() * parameter.element_size()]
        return _C.CopyProgram(array("q", fields), sizes, wire_bytes, 2, scales)

    def pack(
        self, parameter: torch.Tensor, wire: torch.Tensor, workers: _C.CopyWorkers | None = None
    ) -> list[int]:
        """Fill ``wire``, uint8; returns both digests as unsigned numbers."""
        digests = torch.zeros(2, dtype=torch.int64)
        program = self.program(parameter, wire.numel())
        program.pack([parameter.data_ptr()], wire.data_ptr(), digests.data_ptr(), workers)
        return [int(value) % (1 << 64) for value in digests]

    def unpack(
        self, parameter: torch.Tensor, wire: torch.Tensor, workers: _C.CopyWorkers | None = None
    ) -> list[int]:
        """Fill the segment of ``parameter``; returns both digests as unsigned numbers."""
        digests = torch.zeros(2, dtype=torch.int64)
        program = self.program(parameter, wire.numel())
        program.unpack([parameter.data_ptr()], wire.data_ptr(), digests.data_ptr(), workers)
        return [int(value) % (1 << 64) for value in digests]
