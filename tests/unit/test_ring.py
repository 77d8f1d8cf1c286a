"""The ring as users see it: records, groups, acknowledgements, policies, waiting."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from asyncrl.ring import Ring
from asyncrl.ring.errors import (
    KeyTooOld,
    MemberBusy,
    NotAMember,
    RecordStale,
    RecordTooLarge,
    RingClosed,
    RingFull,
    RingTimeout,
)
from tests.pace import idle
from tests.unit.ring_samples import assert_same, make_sample, numbers, temporary_ring


@pytest.fixture
def path() -> object:
    with temporary_ring() as ring:
        yield ring


@pytest.fixture
def producer(path: Path) -> Ring:
    return Ring.open(path, role="producer", name="rollout-3")


def reader(path: Path, name: str = "trainer") -> Ring:
    return Ring.open(path, role="reader", name=name)


def test_a_sample_comes_back_as_it_was(path: Path, producer: Ring) -> None:
    sample = make_sample(5, version=3)
    assert producer.put(sample, timeout=1)
    with reader(path).group("dp0").get_batch(1, timeout=1) as batch:
        assert (batch[0].min_version, batch[0].max_version) == (3, 3)
        assert_same(batch[0].sample(), sample)
        batch.ack()


def test_every_rank_sees_the_same_batches(path: Path, producer: Ring) -> None:
    groups = [reader(path).group("dp0", rank=rank, size=3) for rank in range(3)]
    producer.put_many([make_sample(i) for i in range(6)], timeout=1)
    for first, wanted in ((2, 4), (0, 2)):
        seen = []
        for rank in (first, (first + 1) % 3, (first + 2) % 3):
            with groups[rank].get_batch(wanted if rank == first else 1, timeout=1) as batch:
                seen.append(numbers(batch))
                batch.ack()
        assert seen[0] == seen[1] == seen[2] and len(seen[0]) == wanted
    assert producer.stats().held == 0


def test_a_token_budget_takes_the_longest_run_that_fits(path: Path, producer: Ring) -> None:
    group = reader(path).group("dp0")
    producer.put_many([make_sample(i, num_tokens=n) for i, n in enumerate((30, 30, 50, 90))], timeout=1)
    with group.get_batch(max_tokens=100, timeout=1) as batch:
        assert numbers(batch) == [0, 1]
        batch.ack()
    with group.get_batch(max_tokens=60, timeout=1) as batch:
        assert numbers(batch) == [2]
        batch.ack()
    with group.get_batch(max_tokens=10, timeout=1) as batch:
        assert numbers(batch) == [3], "a record above the budget comes alone"


def test_a_batch_without_ack_comes_again_and_with_ack_never(path: Path, producer: Ring) -> None:
    handle = reader(path)
    group = handle.group("dp0")
    producer.put_many([make_sample(i) for i in range(4)], timeout=1)
    with group.get_batch(2, timeout=1) as first, group.get_batch(2, timeout=1) as second:
        assert (numbers(first), numbers(second)) == ([0, 1], [2, 3])
        second.ack()
    del first, second
    assert producer.stats().nacks == 2
    with group.get_batch(2, timeout=1) as batch:
        assert numbers(batch) == [0, 1]
    handle.detach()
    with reader(path).group("dp0").get_batch(2, timeout=1) as batch:
        assert numbers(batch) == [0, 1], "a restarted rank resumes at its first unacknowledged batch"
        batch.ack()
    assert producer.stats().num_free == 16


def test_a_dropped_batch_is_a_nack(path: Path, producer: Ring) -> None:
    group = reader(path).group("dp0")
    producer.put(make_sample(1), timeout=1)
    view = group.get_batch(1, timeout=1)[0].numpy("token_ids")
    with pytest.raises(RingTimeout):
        group.get_batch(1, timeout=0)
    del view
    assert numbers(group.get_batch(1, timeout=0)) == [1]


def test_acknowledgement_modes(path: Path, producer: Ring) -> None:
    producer.put_many([make_sample(i) for i in range(6)], timeout=1)
    on_release = reader(path).group("a", ack="release")
    with on_release.get_batch(2, timeout=1):
        pass
    with pytest.raises(KeyError), on_release.get_batch(2, timeout=1):
        raise KeyError
    assert producer.stats().acks == 2
    with on_release.get_batch(2, timeout=1) as batch:
        assert numbers(batch) == [2, 3]

    durable = reader(path).group("b", ack="checkpoint")
    for _ in range(2):
        with durable.get_batch(1, timeout=1) as batch:
            batch.ack()
    assert producer.stats().acks == 4
    durable.commit()
    assert producer.stats().acks == 6


def test_resuming_from_a_checkpoint_skips_what_it_contains(path: Path, producer: Ring) -> None:
    producer.put_many([make_sample(i) for i in range(4)], timeout=1)
    before = reader(path)
    group = before.group("dp0", ack="checkpoint")
    with group.get_batch(2, timeout=1) as batch:
        batch.ack()
        durable = batch.end
    del batch, group  # as if killed after the checkpoint was durable, before `commit`
    before.detach()
    group = reader(path).group("dp0", ack="checkpoint", resume_at=durable)
    assert numbers(group.get_batch(1, timeout=1)) == [2]


def test_a_key_is_published_once(path: Path, producer: Ring) -> None:
    assert producer.put(make_sample(1), key=("rollout-3", 7), timeout=1)
    assert not producer.put(make_sample(1), key=("rollout-3", 7), timeout=1)
    assert producer.put(make_sample(2), key=("rollout-3", 6), timeout=1), "keys may come in any order"
    assert producer.put(make_sample(3), key=("rollout-4", 7), timeout=1)
    assert producer.put(make_sample(4), key=(12, 7), timeout=1)
    keys = [("rollout-3", 6), ("rollout-3", 8), None]
    assert producer.put_many([make_sample(5)] * 3, keys=keys, timeout=1) == 2
    assert (producer.stats().depth, producer.stats().duplicates) == (6, 2)


def test_a_key_behind_the_window_is_an_error() -> None:
    with temporary_ring(key_window=64) as path:
        producer = Ring.open(path, role="producer", name="p")
        group = reader(path).group("dp0", ack="release")
        for seq in (0, 64, 200):
            producer.put(make_sample(1), key=("p", seq), timeout=1)
        with group.get_batch(3, timeout=1):
            pass
        assert not producer.put(make_sample(1), key=("p", 200), timeout=1)
        with pytest.raises(KeyTooOld, match="key sequence 1 is more than 64"):
            producer.put(make_sample(1), key=("p", 1), timeout=1)


def test_versions(path: Path, producer: Ring) -> None:
    producer.put_many([make_sample(i, version=i) for i in range(4)], timeout=1)
    assert producer.evict(1) == 1
    with pytest.raises(RecordStale, match="version 0 is below the ring's min_version = 1"):
        producer.put(make_sample(9, version=0), timeout=1)
    group = reader(path).group("dp0")
    producer.set_min_version(3)
    assert numbers(group.get_batch(1, timeout=1)) == [3], "stale records are skipped"
    stats = producer.stats()
    assert (stats.dropped_evicted, stats.dropped_stale, stats.min_version) == (1, 2, 3)
    assert producer.put(make_sample(9, version=0), version=5, timeout=1)


def test_when_full(path: Path) -> None:
    failing = Ring.open(path, role="producer", name="f", when_full="fail")
    dropping = Ring.open(path, role="producer", name="d", when_full="drop_oldest")
    failing.put_many([make_sample(i) for i in range(16)], timeout=1)
    with pytest.raises(RingFull, match="16 of 16 slots are used, 16 records wait for a reader"):
        failing.put(make_sample(16), timeout=1)
    group = reader(path).group("dp0")
    held = group.get_batch(2, timeout=1)
    assert dropping.put(make_sample(17), timeout=1)
    assert dropping.stats().dropped_oldest == 1
    assert numbers(held) == [0, 1], "held records are not dropped"
    assert numbers(group.get_batch(14, timeout=1)) == [*range(3, 16), 17]


def test_a_full_ring_names_who_holds_it(path: Path, producer: Ring) -> None:
    group = reader(path, "trainer-0").group("dp0", rank=0, size=2)
    producer.put_many([make_sample(i) for i in range(16)], timeout=1)
    batch = group.get_batch(16, timeout=1)
    batch.ack()
    started = time.monotonic()
    with pytest.raises(RingTimeout) as caught:
        producer.put(make_sample(1), timeout=0.25)
    assert 0.2 < time.monotonic() - started < 5
    message = str(caught.value)
    assert f"group dp0 rank 0, trainer-0 (pid {os.getpid()}, alive), keeps 16" in message
    assert "group dp0 rank 1, not attached, keeps 16" in message


def test_an_empty_ring_names_its_producers(path: Path, producer: Ring) -> None:
    producer.put(make_sample(1), timeout=1)
    with pytest.raises(
        RingTimeout, match=r"waited for 2 records as rank 0 of group dp0; 1 records of 20 tokens"
    ):
        reader(path).group("dp0").get_batch(2, timeout=0)
    with pytest.raises(RingTimeout, match=rf"producers: rollout-3 \(pid {os.getpid()}, alive\)"):
        reader(path).group("dp1").get_batch(2, timeout=0)


def test_closing(path: Path, producer: Ring) -> None:
    group = reader(path).group("dp0")
    producer.put_many([make_sample(i) for i in range(3)], timeout=1)
    producer.close()
    with pytest.raises(RingClosed):
        producer.put(make_sample(3), timeout=1)
    seen = []
    for batch in group.batches(2, timeout=1):
        seen.append(numbers(batch))
        batch.ack()
    assert seen == [[0, 1], [2]]


def test_a_record_too_large(path: Path, producer: Ring) -> None:
    with pytest.raises(RecordTooLarge, match=r"a record of \d+ bytes exceeds max_record_bytes = 32768"):
        producer.put(make_sample(1, num_tokens=3000), timeout=1)


def test_a_batch_too_large(path: Path) -> None:
    with pytest.raises(RecordTooLarge, match="a batch of 17 records exceeds the 16 slots"):
        reader(path).group("dp0").get_batch(17, timeout=60)


def test_wrong_fields_are_named(producer: Ring) -> None:
    sample = make_sample(1)
    object.__setattr__(sample, "token_ids", sample.token_ids.astype(np.int64))
    with pytest.raises(TypeError, match="token_ids: expected dtype int32, got an array of format 'l'"):
        producer.put(sample, timeout=1)


def test_membership(path: Path) -> None:
    first = reader(path, "one")
    group = first.group("dp0", rank=1, size=2)
    with pytest.raises(NotAMember, match="rank 2 of 2"):
        first.group("dp0", rank=2, size=2)
    with pytest.raises(NotAMember, match="has 2 members, this process says 3"):
        first.group("dp0", rank=0, size=3)
    with pytest.raises(MemberBusy, match="rank 1 belongs to one"):
        reader(path).group("dp0", rank=1, size=2)
    with pytest.raises(MemberBusy, match="rank 1 is in use by one"):
        first.remove_group("dp0")
    group.leave()
    with pytest.raises(NotAMember, match="no member of group dp0 any more"):
        group.get_batch(1, timeout=0)


def test_removing_a_group_gives_back_what_nobody_learned_from(path: Path, producer: Ring) -> None:
    old = [reader(path) for _ in range(2)]
    groups = [handle.group("old", rank=rank, size=2) for rank, handle in enumerate(old)]
    producer.put_many([make_sample(i) for i in range(4)], timeout=1)
    with groups[0].get_batch(1, timeout=1) as batch:
        batch.ack()
    with groups[0].get_batch(2, timeout=1) as batch:
        pass
    del batch
    for handle in old:
        handle.detach()
    producer.remove_group("old")
    assert producer.stats().dropped_group_removed == 1
    assert numbers(reader(path).group("new").get_batch(3, timeout=1)) == [1, 2, 3]


def test_a_waiting_reader_is_woken(path: Path, producer: Ring) -> None:
    group = reader(path).group("dp0")
    timer = threading.Timer(0.1, lambda: producer.put_many([make_sample(i) for i in range(3)], timeout=1))
    timer.start()
    assert numbers(group.get_batch(3, timeout=10)) == [0, 1, 2]
    timer.join()


async def test_asyncio_waits_without_threads(path: Path, producer: Ring) -> None:
    group = reader(path).group("dp0", ack="release")
    waiting = asyncio.create_task(group.aget_batch(16, timeout=20))
    await idle(0.05)
    threads = threading.active_count()
    waiting.cancel()
    producer.put_many([make_sample(i) for i in range(16)], timeout=1)
    blocked = [asyncio.create_task(producer.aput(make_sample(16 + i), timeout=20)) for i in range(3)]
    await idle(0.05)
    assert threading.active_count() == threads
    with await group.aget_batch(8, timeout=20) as batch:
        assert len(batch) == 8
    assert await asyncio.gather(*blocked) == [True, True, True]
    with pytest.raises(RingTimeout, match="no room"):
        await producer.aput_many([make_sample(i) for i in range(20)], timeout=0.1)


def fill(producer: Ring) -> None:
    with pytest.raises(RingTimeout):
        while True:
            producer.put(make_sample(1), timeout=0)


def test_a_waiting_large_record_goes_first() -> None:
    with temporary_ring(arena_bytes=1 << 14, num_slots=64) as path:
        producer = Ring.open(path, role="producer", name="small")
        large = Ring.open(path, role="producer", name="large")
        group = reader(path).group("dp0", ack="release")
        fill(producer)
        sample = make_sample(99, num_tokens=500)
        waiting = threading.Thread(target=lambda: large.put(sample, timeout=60))
        waiting.start()
        deadline = time.monotonic() + 30
        message = ""
        while "first in line is large" not in message:  # it is, once it has waited a moment
            assert time.monotonic() < deadline, message
            with pytest.raises(RingTimeout) as caught:
                producer.put(make_sample(1), timeout=0.02)
            message = str(caught.value)
        seen = []
        while 99 not in seen:
            with group.get_batch(1, timeout=30) as batch:
                seen += numbers(batch)
            if waiting.is_alive():
                with contextlib.suppress(RingTimeout):
                    producer.put(
                        make_sample(2), timeout=0
                    )  # without the ticket, this takes the room for ever
        waiting.join()
        assert 2 not in seen, "a small record overtook the large one"
