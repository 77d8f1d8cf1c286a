"""Views of records, without a copy: what they show, and how long they keep the bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.ring import Ring
from asyncrl.ring.codec import FIELDS
from asyncrl.ring.errors import BatchReleased, ViewsAlive
from tests.unit.ring_samples import make_sample, temporary_ring


@pytest.fixture
def path() -> object:
    with temporary_ring() as ring:
        yield ring


@pytest.fixture
def producer(path: Path) -> Ring:
    return Ring.open(path, role="producer", name="rollout-3")


def reader(path: Path, name: str = "trainer") -> Ring:
    return Ring.open(path, role="reader", name=name)


def test_views_are_zero_copy_and_read_only(path: Path, producer: Ring) -> None:
    sample = make_sample(5)
    producer.put(sample, timeout=1)
    batch = reader(path).group("dp0").get_batch(1, timeout=1)
    ids, again = batch[0].numpy("token_ids"), batch[0].numpy("token_ids")
    assert ids.ctypes.data == again.ctypes.data and ids.ctypes.data % 64 == 0
    tensor = batch[0].torch("behav_logprobs")
    assert torch.equal(tensor, torch.from_numpy(sample.behav_logprobs))
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


def test_views_keep_the_records_after_ack_and_release_refuses(path: Path, producer: Ring) -> None:
    group = reader(path).group("dp0")
    producer.put(make_sample(1), timeout=1)
    with group.get_batch(1, timeout=1) as batch:
        part = batch[0].numpy("token_ids")[4:6]
        batch.ack()
        with pytest.raises(ViewsAlive, match="1 views of the batch's 1 records") as caught:
            batch.release()
        assert isinstance(caught.value, BufferError)
    assert producer.stats().held == 1
    producer.put_many([make_sample(9) for _ in range(15)], timeout=1)
    assert part.tolist() == [1, 1], "the bytes are not reused under a view"
    del part, batch, caught  # the traceback keeps the batch
    assert producer.stats().held == 0


def test_a_released_batch_says_so(path: Path, producer: Ring) -> None:
    producer.put(make_sample(1), timeout=1)
    batch = reader(path).group("dp0").get_batch(1, timeout=1)
    batch.release()
    for use in (lambda: batch[0].numpy("token_ids"), batch.ack):
        with pytest.raises(BatchReleased, match="released"):
            use()
    with pytest.raises(IndexError, match="record 3 of a batch of 1"):
        batch[3]


def test_values_of_a_batch_are_those_of_its_records(path: Path, producer: Ring) -> None:
    samples = [make_sample(group, version=group) for group in range(3)]
    producer.put_many(samples, timeout=1)
    batch = reader(path).group("dp0").get_batch(3, timeout=1)
    values = batch.values()
    assert len(values) == 3
    for sample, record, together in zip(samples, batch, values, strict=True):
        alone = record.values()
        assert list(together) == list(alone) == [field.name for field in FIELDS]
        for field in FIELDS:
            assert np.array_equal(together[field.name], getattr(sample, field.name)), field.name
            if field.num_dims:
                assert together[field.name].ctypes.data == alone[field.name].ctypes.data
                assert not together[field.name].flags.writeable
    some = batch.values(("reward", "token_ids"))
    assert [list(each) for each in some] == [["reward", "token_ids"]] * 3  # in the order of the record
    assert some[2]["reward"] == samples[2].reward
    with pytest.raises(KeyError, match="no field color"):
        batch.values(("color",))
    del alone, together, record, some
    with pytest.raises(ViewsAlive, match="1 views of the batch's 3 records"):
        batch.release()
    part = values[1]["token_ids"][:2]
    del values
    with pytest.raises(ViewsAlive):
        batch.release()
    del part
    batch.release()
    with pytest.raises(BatchReleased):
        batch.values()


def test_room_given_back_is_used_again_at_once(path: Path, producer: Ring) -> None:
    """While readers keep up, the bytes stay in the processor's cache."""
    group = reader(path).group("dp0")
    addresses = set()
    for number in range(64):
        producer.put(make_sample(number), timeout=1)
        with group.get_batch(1, timeout=1) as batch:
            addresses.add(batch.values()[0]["token_ids"].ctypes.data)
            batch.ack()
    assert len(addresses) == 1
