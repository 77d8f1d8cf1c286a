"""What a transport is to the benchmark, and the ring as one.

A transport is set up by the reader, travels to the producers as plain data, and carries the same four arrays
of a sample plus a sequence number and a time. Each copies as little as it can: views where it has them.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.ring import Ring
from asyncrl.types import FinishReason, Sample

ARRAYS = (
    ("token_ids", np.dtype(np.int32)),
    ("loss_mask", np.dtype(np.uint8)),
    ("behav_logprobs", np.dtype(np.float32)),
    ("policy_versions", np.dtype(np.int32)),
)
RECEIVED = (*(name for name, _ in ARRAYS), "group_id", "reward")  # what every transport hands over
BYTES_PER_TOKEN = sum(dtype.itemsize for _, dtype in ARRAYS)
Received = tuple[dict[str, np.ndarray], int, float]  # arrays, sequence number, time of sending


def make_sample(payload_bytes: int) -> Sample:
    count = max(2, payload_bytes // BYTES_PER_TOKEN)
    random = np.random.default_rng(0)
    return Sample(
        group_id=0,
        sample_idx=0,
        num_prompt_tokens=1,
        reward=0.0,
        finish_reason=FinishReason.STOP,
        token_ids=random.integers(0, 150_000, count, dtype=np.int32),
        loss_mask=np.ones(count, np.uint8),
        behav_logprobs=random.standard_normal(count, dtype=np.float32),
        policy_versions=np.zeros(count, np.int32),
        group_rewards=np.zeros(4, np.float32),
    )


def arrays_of(sample: Sample) -> dict[str, np.ndarray]:
    return {name: getattr(sample, name) for name, _ in ARRAYS}


class Transport:
    """Base: what a transport does not need, it leaves as it is."""

    name = ""
    needs_ray = False
    max_producers = 2
    batch = 1  # samples that put_many and get_many move at once; above 1 they are what is measured
    paced = True  # its latency at a slow pace means something

    def setup(self, payload_bytes: int, depth: int) -> None: ...
    def inherit(self, handles: Mapping[str, Any]) -> None:
        """Take what a process can only be given when it is started, by the name of the transport."""

    def connect_producer(self) -> None: ...
    def put(self, sample: Sample) -> None: ...
    def put_many(self, samples: Sequence[Sample]) -> None: ...
    def connect_reader(self) -> None: ...
    def get(self) -> Received: ...
    def get_many(self) -> list[Received]: ...
    def release(self) -> None: ...
    def close(self) -> None: ...


class AsyncrlRing(Transport):
    """This project's ring, one record at a time."""

    name = "asyncrl"

    def setup(self, payload_bytes: int, depth: int) -> None:
        self.path = f"/dev/shm/asyncrl-bench-{uuid.uuid4().hex[:8]}"
        Ring.create(Path(self.path), arena_bytes=depth * (payload_bytes + 4096), num_slots=4 * depth).detach()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def connect_producer(self) -> None:
        self.ring = Ring.open(Path(self.path), role="producer", name="bench")

    def put(self, sample: Sample) -> None:
        self.ring.put(sample, version=0, timeout=60)

    def connect_reader(self, rank: int = 0, size: int = 1) -> None:
        self.ring = Ring.open(Path(self.path), role="reader", name="bench")
        self.group = self.ring.group("bench", rank=rank, size=size, ack="release")

    def get(self) -> Received:
        self.current = self.group.get_batch(1, timeout=60)
        (values,) = self.current.values(RECEIVED)
        return values, values["group_id"], values["reward"]

    def release(self) -> None:
        """As a `with` block ends: acknowledged, and the room given back."""
        self.current.__exit__(None, None, None)

    def close(self) -> None:
        self.ring.detach()
        Ring.unlink(Path(self.path))


class AsyncrlBatches(AsyncrlRing):
    """The ring with put_many and get_batch of 32."""

    name = "asyncrl, batches of 32"
    batch = 32
    paced = False

    def put_many(self, samples: Sequence[Sample]) -> None:
        self.ring.put_many(samples, version=0, timeout=60)

    def get_many(self) -> list[Received]:
        self.current = self.group.get_batch(self.batch, timeout=60)
        return [(values, values["group_id"], values["reward"]) for values in self.current.values(RECEIVED)]
