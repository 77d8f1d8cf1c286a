"""A rollouter that dies and comes back while its rings live on: nothing is lost, nothing is doubled."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.ring.ring import Ring
from asyncrl.rollout.sinks import RingSink
from tests.unit.rollout_job import Job


@pytest.fixture
def ring_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="asyncrl-test-") as directory:
        yield Path(directory)


async def test_a_second_life_fills_the_same_rings(tmp_path: Path, ring_dir: Path) -> None:
    paths = [ring_dir / "dp0", ring_dir / "dp1"]
    for path in paths:
        Ring.create(path, arena_bytes=1 << 20, num_slots=256).detach()
    readers = [Ring.open(path, role="reader", name="trainer") for path in paths]
    groups = [ring.group("dp") for ring in readers]

    for life in range(2):
        rings = [Ring.open(path, role="producer", name="rollouter") for path in paths]
        job = Job(tmp_path, num_rings=2, num_batches=4)
        job.sink.forward = RingSink(rings, job.journal.producer_uid, timeout_s=20.0)
        if life == 0:
            await job.train_batch()
            await job.until(lambda job=job: len(job.sink.groups) >= 5)
            await job.crash()  # positions 0..4 are in the rings, nothing is acknowledged
        else:
            await job.train_all()
            await job.stop()
        for ring in rings:
            ring.detach()

    seen: list[tuple[int, int]] = []
    for group, reader in zip(groups, readers, strict=True):
        for _ in range(4):
            with group.get_batch(2, timeout=20.0) as batch:
                samples = [batch[i].sample() for i in range(len(batch))]
                batch.ack()
            assert len({s.group_id for s in samples}) == 1, "a replica's share of a batch is one group here"
            seen += [(s.group_id, s.sample_idx) for s in samples]
        assert reader.stats().depth == 0
        assert reader.stats().duplicates > 0
    assert sorted(seen) == [(g, s) for g in range(8) for s in range(2)]
    for reader, path in zip(readers, paths, strict=True):
        reader.detach()
        Ring.unlink(path)
