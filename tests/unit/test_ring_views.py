"""Views of records, without a copy: what they show, and how long they keep the bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import asyncrl._C as _C
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


def test_records_of_different_tables_in_one_batch(path: Path, producer: Ring) -> None:
    """Every record describes itself: what the first one has, and where, says nothing about the others."""
    tables = (
        [("a", "int64", 0), ("b", "int32", 1), ("c", "str", 0)],
        [("a", "int64", 0), ("b", "int32", 1), ("c", "str", 0)],
        [("c", "str", 0), ("b", "int32", 1), ("a", "int64", 0)],
        [("a", "int64", 0), ("b", "int32", 1)],
        [("a", "int64", 0), ("b", "int32", 1), ("c", "str", 0), ("d", "float64", 0)],
    )
    written = []
    for number, table in enumerate(tables):
        values = {"a": number, "b": np.arange(number, dtype=np.int32), "c": f"c{number}", "d": number / 2}
        fields = [values[name] for name, _, _ in table]
        writer = _C.ring.Producer(
            producer._session, _C.ring.RecordFormat(table), _C.ring.WhenFull.BLOCK, False
        )
        assert writer.put_as([tuple(fields)], 0, 1.0) == 1
        written.append({name: values[name] for name, _, _ in table})
    batch = reader(path).group("dp0").get_batch(len(tables), timeout=1)
    for expected, found in zip(written, batch.values(), strict=True):
        assert list(found) == list(expected)
        assert {**found, "b": found["b"].tolist()} == {**expected, "b": expected["b"].tolist()}
    some = batch.values(("b", "a"))
    assert [(each["a"], each["b"].tolist()) for each in some] == [(n, list(range(n))) for n in range(5)]
    assert all(each.keys() == {"a", "b"} for each in some)
