"""Samples and rings for the tests of the ring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from asyncrl.ring import Ring
from asyncrl.ring.codec import FIELDS
from asyncrl.types import FinishReason, Sample, Segment, SegmentKind, build_sample


def make_sample(number: int, num_tokens: int = 20, version: int = 0) -> Sample:
    """A sample whose arrays all follow from ``number``."""
    segments = [
        Segment(SegmentKind.MODEL, (number,) * (num_tokens - 3), (-0.5,) * (num_tokens - 3), version),
        Segment(SegmentKind.TOOL, (7,)),
    ]
    return build_sample(
        group_id=number,
        sample_idx=number % 4,
        prompt_ids=[1, 2],
        segments=segments,
        reward=number / 4,
        finish_reason=FinishReason.LENGTH,
        group_rewards=[0.0, 0.25, 0.5, number / 4],
    )


def assert_same(left: Sample, right: Sample) -> None:
    """Names the first field that differs."""
    for field in FIELDS:
        a, b = getattr(left, field.name), getattr(right, field.name)
        assert np.array_equal(a, b), f"{field.name}: {a} != {b}"
        if field.num_dims:
            assert a.dtype == b.dtype, f"{field.name}: {a.dtype} != {b.dtype}"


@contextmanager
def temporary_ring(arena_bytes: int = 1 << 16, num_slots: int = 16, **options: int) -> Iterator[Path]:
    """The path of a ring in shared memory."""
    with TemporaryDirectory(dir="/dev/shm", prefix="asyncrl-test-") as directory:
        path = Path(directory) / "ring"
        Ring.create(path, arena_bytes=arena_bytes, num_slots=num_slots, **options).detach()
        yield path


def numbers(ring_batch: object) -> list[int]:
    """The numbers of a batch's samples."""
    return [record.scalar("group_id") for record in ring_batch]  # type: ignore[attr-defined]
