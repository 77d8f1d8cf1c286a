"""Every operation of a copy program on the CPU, against plain torch; and what the digest sees."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import asyncrl._C as _C
from tests.unit.reshard_reference import OneSegment, digest, first_mismatch, packed_bytes, quantised

COPIES = {"copy1": torch.uint8, "copy2": torch.bfloat16, "copy4": torch.float32, "copy8": torch.int64}
CASTS = {"f32_as_bf16": (torch.float32, torch.bfloat16), "bf16_as_f32": (torch.bfloat16, torch.float32)}
TRANSPOSES = {"transpose1": torch.uint8, "transpose2": torch.bfloat16, "transpose4": torch.float32}
SHAPES = [(1, 1), (1, 1000), (7, 3), (5, 64), (33, 129), (130, 70), (3, 2048)]


def random_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(0, 255, shape, generator=generator).to(dtype)
    return (torch.randn(shape, generator=generator) * 10).to(dtype)


def check(op: str, local: torch.dtype, wire_dtype: torch.dtype, seed: int, shape: tuple[int, int]) -> None:
    """Pack and unpack one strided segment at a random place, alone and by three threads."""
    chosen = random.Random(seed)
    (rows, cols), gap, offset = shape, chosen.choice([0, 1, 5, 16]), chosen.randrange(9)
    turned = op.startswith("transpose")
    stored_rows, stored_cols = (cols, rows) if turned else (rows, cols)
    stride = stored_cols + gap
    segment = OneSegment(op, rows, cols, stride, offset, chosen.randrange(1000), cols + chosen.randrange(4))
    parameter = random_values((offset + stored_rows * stride,), local, seed)
    expected = parameter[offset:].view(stored_rows, stride)[:, :stored_cols]
    expected = (expected.T if turned else expected).to(wire_dtype)
    expected_digest = digest(expected, segment.position, segment.position_stride)
    for workers in (None, _C.CopyWorkers(3)):
        wire = torch.zeros(expected.numel() * expected.element_size(), dtype=torch.uint8)
        assert segment.pack(parameter, wire, workers) == [expected_digest, 0]
        assert first_mismatch(wire.view(wire_dtype).view(rows, cols), expected) == ""
        target = torch.full_like(parameter, 3)
        assert segment.unpack(target, wire, workers) == [expected_digest, 0]
        target_rows = target[offset:].view(stored_rows, stride)
        received = target_rows[:, :stored_cols]
        assert first_mismatch(received.T if turned else received, expected.to(local)) == ""
        assert bool((target[:offset] == 3).all() and (target_rows[:, stored_cols:] == 3).all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", COPIES)
def test_copies(op: str, shape: tuple[int, int]) -> None:
    for seed in range(8):
        check(op, COPIES[op], COPIES[op], seed, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", CASTS)
def test_casts(op: str, shape: tuple[int, int]) -> None:
    for seed in range(8):
        check(op, *CASTS[op], seed, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", TRANSPOSES)
def test_transposes(op: str, shape: tuple[int, int]) -> None:
    for seed in range(8):
        check(op, TRANSPOSES[op], TRANSPOSES[op], seed, shape)


@pytest.mark.parametrize("op", ["copy4", "copy2", "f32_as_bf16", "bf16_as_f32"])
def test_buckets_larger_than_the_cache(op: str) -> None:
    local, wire = CASTS.get(op, (COPIES.get(op), COPIES.get(op)))
    assert local is not None and wire is not None
    check(op, local, wire, 1, (5000, 2200))


def quantise(values: torch.Tensor, workers: _C.CopyWorkers | None = None) -> None:
    """Quantise a segment of [rows, cols] and compare codes, scales and both digests."""
    rows, cols = values.shape
    op = "f32_as_fp8" if values.dtype == torch.float32 else "bf16_as_fp8"
    stride, offset = cols + 3, 5
    parameter = torch.zeros(offset + rows * stride, dtype=values.dtype)
    parameter[offset:].view(rows, stride)[:, :cols] = values
    codes, scales = quantised(values)
    scales_at = packed_bytes(rows * cols, 1)
    wire = torch.zeros(scales_at + 4 * scales.numel(), dtype=torch.uint8)
    segment = OneSegment(op, rows, cols, stride, offset, position=77)
    digests = segment.pack(parameter, wire, workers)
    assert first_mismatch(wire[scales_at:].view(torch.float32).view(scales.shape), scales) == ""
    assert first_mismatch(wire[: rows * cols].view(rows, cols), codes) == ""
    assert digests == [digest(codes, 77), digest(scales)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (260, 300), (3, 513)])
def test_quantising(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for seed, magnitude in enumerate([1.0, 1e-3, 1e30, 1e-30, 1e-37]):
        quantise((random_values(shape, torch.float32, seed) * magnitude).to(dtype))
    quantise(random_values(shape, dtype, 9), _C.CopyWorkers(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantising_what_is_no_ordinary_number(dtype: torch.dtype) -> None:
    values = random_values((300, 400), dtype, 3)
    values[5, 5] = torch.nan
    values[6, 130] = torch.inf
    values[130, 7] = -torch.inf
    values[128:256, 128:256] = 0
    values[129, 130] = -0.0
    values[256:, 256:384] = 1e-45  # the smallest denormal of float32, 0 in bfloat16
    values[256:, 384:] = 448 * 1.5 * 2.0**-149  # its scale is rounded down to a denormal
    quantise(values)


def test_every_bfloat16_is_quantised_as_torch_does() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = every[every.isfinite() & (every.abs() <= 448)]
    padded = torch.zeros(-(-len(numbers) // 127) * 127, dtype=torch.bfloat16)
    padded[: len(numbers)] = numbers
    column = torch.full((len(padded) // 127, 1), 448.0, dtype=torch.bfloat16)  # so that every scale is 1
    quantise(torch.cat([padded.view(-1, 127), column], dim=1))


def test_quantised_segments_are_only_packed() -> None:
    parameter, wire = torch.zeros(4), torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="segment 0 of a copy program quantises; it can only be packed"):
        OneSegment("f32_as_fp8", 2, 2, 2).unpack(parameter, wire)
    with pytest.raises(ValueError, match="shared by 1 to 256 threads, not 0"):
        _C.CopyWorkers(0)


def digest_of(values: torch.Tensor) -> int:
    op = f"copy{values.element_size()}"
    wire = torch.empty(values.numel() * values.element_size(), dtype=torch.uint8)
    return OneSegment(op, 1, values.numel(), values.numel()).pack(values, wire)[0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_any_single_change_shows(dtype: torch.dtype) -> None:
    values = random_values((67,), dtype, 4)
    before = digest_of(values)
    for at, bit in itertools.product(range(67), range(8 * values.element_size())):
        changed = values.clone()
        view = changed.view(torch.uint8)
        view[at * values.element_size() + bit // 8] ^= 1 << (bit % 8)
        assert digest_of(changed) != before, (at, bit)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_moved_and_exchanged_elements_show(dtype: torch.dtype) -> None:
    one = torch.zeros(2048, dtype=dtype)
    seen = set()
    for at in range(len(one)):
        one.zero_()
        one[at] = 1
        seen.add(digest_of(one))
    assert len(seen) == len(one)
    corners = torch.zeros(64, 64, dtype=dtype)
    chosen = random.Random(0)
    for _ in range(2000):  # equal values that change places in opposite directions
        (top, bottom), (left, right) = (sorted(chosen.sample(range(64), 2)) for _ in range(2))
        corners.zero_()
        corners[top, left] = corners[bottom, right] = 1
        before = digest_of(corners.flatten())
        corners[top, left] = corners[bottom, right] = 0
        corners[top, right] = corners[bottom, left] = 1
        assert digest_of(corners.flatten()) != before


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_pieces_add_up_however_they_are_cut(dtype: torch.dtype) -> None:
    chosen = random.Random(2)
    for seed in range(50):
        values = random_values((chosen.randrange(2, 400),), dtype, seed)
        edges = sorted({0, len(values), *(chosen.randrange(len(values)) for _ in range(5))})
        total = 0
        for first, last in itertools.pairwise(edges):
            segment = OneSegment(
                f"copy{values.element_size()}", 1, last - first, last - first, first, position=first
            )
            wire = torch.empty((last - first) * values.element_size(), dtype=torch.uint8)
            total += segment.pack(values, wire)[0]
        assert total % (1 << 64) == digest_of(values)
