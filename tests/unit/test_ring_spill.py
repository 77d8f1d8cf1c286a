"""Spilling: nothing waits, nothing is lost, nothing is published twice, order is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.ring import Ring
from asyncrl.ring.errors import RingCorrupt
from asyncrl.ring.spill import SpilledSample as Spilled
from asyncrl.ring.spill import SpillingProducer, decode, encode, read_frames
from tests.unit.ring_samples import assert_same, make_sample, numbers, temporary_ring


@pytest.fixture
def ring() -> Iterator[Ring]:
    with temporary_ring(num_slots=4) as path:
        yield Ring.open(path, role="producer", name="p", when_full="fail")


def take(ring: Ring, count: int) -> list[int]:
    group = Ring.open(ring.path, role="reader", name="r").group("dp0")
    with group.get_batch(count, timeout=1) as batch:
        batch.ack()
        return numbers(batch)


def test_a_frame_holds_a_sample(tmp_path: Path) -> None:
    frame = encode(Spilled(make_sample(7), 3, ("p", 9)))
    (tmp_path / "f").write_bytes(frame)
    ((end, body),) = read_frames(tmp_path / "f")
    assert end == len(frame)
    assert_same(decode(body).sample, make_sample(7))
    assert (decode(body).version, decode(body).key) == (3, ("p", 9))


def test_order_is_kept_through_the_file(ring: Ring, tmp_path: Path) -> None:
    producer = SpillingProducer(ring, tmp_path / "spill")
    for number in range(10):
        producer.put(make_sample(number))
    assert (ring.stats().depth, producer.num_spilled) == (4, 6)
    seen = take(ring, 4)
    producer.put(make_sample(10))
    seen += take(ring, 4)
    assert producer.drain() and os.path.getsize(tmp_path / "spill") == 0
    assert seen + take(ring, 3) == list(range(11))


def test_a_restart_goes_on_and_publishes_nothing_twice(ring: Ring, tmp_path: Path) -> None:
    producer = SpillingProducer(ring, tmp_path / "spill")
    for number in range(7):
        producer.put(make_sample(number), key=("p", number))
    assert take(ring, 4) == [0, 1, 2, 3]
    ring.put(make_sample(4), key=("p", 4), timeout=0)  # as if killed between the ring and the truncation
    with (tmp_path / "spill").open("ab") as file:
        file.write(encode(Spilled(make_sample(9), 0, ("p", 9)))[:50])  # and in the middle of a write
    again = SpillingProducer(ring, tmp_path / "spill")
    assert again.drain()
    assert take(ring, 3) == [4, 5, 6]
    assert ring.stats().depth == 0


def test_damage_in_the_middle_is_an_error(ring: Ring, tmp_path: Path) -> None:
    frame = encode(Spilled(make_sample(7), 3, ("p", 9)))
    damaged = frame[:40] + bytes([frame[40] ^ 1]) + frame[41:]
    (tmp_path / "spill").write_bytes(damaged + frame)
    with pytest.raises(RingCorrupt, match="frame at byte 0 is damaged"):
        SpillingProducer(ring, tmp_path / "spill")
