"""The transports that the ring is compared with, and the ring itself, behind one small interface.

A transport is set up by the reader, travels to the producers as plain data, and carries the same four arrays
of a sample plus a sequence number and a time. Each copies as little as it can: views where it has them.
"""

from __future__ import annotations

import asyncio
import collections
import ctypes
import pickle
import shutil
import tempfile
import uuid
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
    inherited = False  # its handle can only be given to a process when that is started
    paced = True  # its latency at a slow pace means something

    def setup(self, payload_bytes: int, depth: int) -> None: ...
    def connect_producer(self) -> None: ...
    def put(self, sample: Sample) -> None: ...
    def flush(self) -> None: ...
    def connect_reader(self) -> None: ...
    def get(self) -> Received: ...
    def release(self) -> None: ...
    def close(self) -> None: ...


class AsyncrlRing(Transport):
    """This project's ring, one record at a time."""

    name = "asyncrl"
    batch = 1

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
        self.group = self.ring.group("bench", rank=rank, size=size)

    def get(self) -> Received:
        self.current = self.group.get_batch(1, timeout=60)
        record = self.current[0]
        return record.arrays(), int(record.scalar("group_id")), float(record.scalar("reward"))

    def release(self) -> None:
        self.current.ack()
        self.current.release()

    def close(self) -> None:
        self.ring.detach()
        Ring.unlink(Path(self.path))


class AsyncrlBatches(AsyncrlRing):
    """The ring with put_many and get_batch of 32."""

    name = "asyncrl, batches of 32"
    batch = 32
    paced = False

    def connect_producer(self) -> None:
        super().connect_producer()
        self.pending: list[Sample] = []

    def put(self, sample: Sample) -> None:
        self.pending.append(sample)
        if len(self.pending) == self.batch:
            self.flush()

    def flush(self) -> None:
        if self.pending:
            self.ring.put_many(self.pending, version=0, timeout=60)
            self.pending = []

    def connect_reader(self, rank: int = 0, size: int = 1) -> None:
        super().connect_reader(rank, size)
        self.current = None
        self.index = 0

    def get(self) -> Received:
        if self.current is None:
            self.current, self.index = self.group.get_batch(self.batch, timeout=60), 0
        record = self.current[self.index]
        return record.arrays(), int(record.scalar("group_id")), float(record.scalar("reward"))

    def release(self) -> None:
        self.index += 1
        if self.index == len(self.current):
            super().release()
            self.current = None


class MpQueue(Transport):
    """multiprocessing.Queue; made anew for every run, so its producers are started for it (`inherited`)."""

    name = "multiprocessing.Queue"
    inherited = True

    def setup(self, payload_bytes: int, depth: int) -> None:
        self.queue = self.context().Queue(depth)

    def context(self) -> Any:
        import multiprocessing

        return multiprocessing.get_context("spawn")

    def put(self, sample: Sample) -> None:
        self.queue.put((arrays_of(sample), sample.group_id, sample.reward))

    def flush(self) -> None:
        self.queue.close()
        self.queue.join_thread()

    def get(self) -> Received:
        received: Received = self.queue.get()
        return received

    def close(self) -> None:
        self.queue.close()


class TorchQueue(MpQueue):
    """torch.multiprocessing.Queue: tensors go through shared memory of their own."""

    name = "torch.multiprocessing.Queue"

    def context(self) -> Any:
        import torch.multiprocessing

        return torch.multiprocessing.get_context("spawn")

    def put(self, sample: Sample) -> None:
        import torch

        tensors = {name: torch.from_numpy(array) for name, array in arrays_of(sample).items()}
        self.queue.put((tensors, sample.group_id, sample.reward))

    def get(self) -> Received:
        tensors, seq, sent = self.queue.get()
        return {name: tensor.numpy() for name, tensor in tensors.items()}, seq, sent


class ZmqPickle5(Transport):
    name = "zmq ipc, pickle 5 out of band"

    def setup(self, payload_bytes: int, depth: int) -> None:
        self.directory = tempfile.mkdtemp(prefix="asyncrl-bench-")
        self.address, self.depth = f"ipc://{self.directory}/socket", depth

    def __getstate__(self) -> dict[str, Any]:
        return {"address": self.address, "depth": self.depth}

    def _socket(self, kind: str) -> Any:
        import zmq

        self.context = zmq.Context()
        self.socket = self.context.socket(getattr(zmq, kind))
        self.socket.set_hwm(max(1, self.depth // 2))
        return self.socket

    def connect_producer(self) -> None:
        self._socket("PUSH").connect(self.address)

    def put(self, sample: Sample) -> None:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(
            (arrays_of(sample), sample.group_id, sample.reward), 5, buffer_callback=buffers.append
        )
        self.socket.send_multipart([head, *(buffer.raw() for buffer in buffers)], copy=False)

    def connect_reader(self) -> None:
        self._socket("PULL").bind(self.address)

    def get(self) -> Received:
        frames = self.socket.recv_multipart(copy=False)
        received: Received = pickle.loads(frames[0].buffer, buffers=[frame.buffer for frame in frames[1:]])
        return received

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()
        shutil.rmtree(self.directory)


class ZmqMsgpack(ZmqPickle5):
    name = "zmq ipc, msgpack"

    def put(self, sample: Sample) -> None:
        import msgpack

        packed = {name: array.data for name, array in arrays_of(sample).items()}
        self.socket.send(msgpack.packb((packed, sample.group_id, sample.reward)), copy=False)

    def get(self) -> Received:
        import msgpack

        packed, seq, sent = msgpack.unpackb(self.socket.recv(copy=False).buffer)
        return {name: np.frombuffer(packed[name], dtype) for name, dtype in ARRAYS}, seq, sent


class Iceoryx2(Transport):
    """Publish and subscribe on byte slices, and an event to sleep on."""

    name = "iceoryx2"

    def setup(self, payload_bytes: int, depth: int) -> None:
        self.service, self.depth = f"bench{uuid.uuid4().hex[:10]}", depth
        self.frame = 64 + sum(
            -(-make_sample(payload_bytes).num_tokens * dtype.itemsize // 64) * 64 for _, dtype in ARRAYS
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"service": self.service, "depth": self.depth, "frame": self.frame}

    def _open(self) -> None:
        import iceoryx2 as iox

        self.iox = iox
        iox.set_log_level(iox.LogLevel.Error)
        self.node = iox.NodeBuilder.new().create(iox.ServiceType.Ipc)
        builder = self.node.service_builder(iox.ServiceName.new(self.service))
        self.topic = (
            builder.publish_subscribe(iox.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(self.depth)
            .subscriber_max_borrowed_samples(4)
            .history_size(0)
            .max_publishers(4)
            .max_subscribers(2)
            .open_or_create()
        )
        self.event = (
            self.node.service_builder(iox.ServiceName.new(self.service + "e")).event().open_or_create()
        )

    def connect_producer(self) -> None:
        self._open()
        self.publisher = (
            self.topic.publisher_builder()
            .initial_max_slice_len(self.frame)
            .backpressure_strategy(self.iox.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        self.notifier = self.event.notifier_builder().create()

    def put(self, sample: Sample) -> None:
        loan = self.publisher.loan_slice_uninit(self.frame)
        bytes_ = np.frombuffer(loan.payload().as_memory_view(), np.uint8)
        bytes_[:8].view(np.int64)[0] = sample.num_tokens
        bytes_[8:16].view(np.int64)[0] = sample.group_id
        bytes_[16:24].view(np.float64)[0] = sample.reward
        at = 64
        for array in arrays_of(sample).values():
            bytes_[at : at + array.nbytes].view(array.dtype)[:] = array
            at += -(-array.nbytes // 64) * 64
        loan.assume_init().send()
        self.notifier.notify()

    def connect_reader(self) -> None:
        self._open()
        self.subscriber = self.topic.subscriber_builder().create()
        self.listener = self.event.listener_builder().create()
        self.patience = self.iox.Duration.from_millis(200)
        self.current = None

    def get(self) -> Received:
        while (loan := self.subscriber.receive()) is None:
            self.listener.timed_wait(self.patience)
        self.current = loan
        bytes_ = np.frombuffer(loan.payload().as_memory_view(), np.uint8)
        count, seq = bytes_[:16].view(np.int64).tolist()
        sent = float(bytes_[16:24].view(np.float64)[0])
        arrays, at = {}, 64
        for name, dtype in ARRAYS:
            size = count * dtype.itemsize
            arrays[name] = bytes_[at : at + size].view(dtype)
            at += -(-size // 64) * 64
        return arrays, seq, sent

    def release(self) -> None:
        self.current.delete()
        self.current = None

    def close(self) -> None:
        del self.subscriber, self.listener, self.topic, self.event, self.node


class RayDeque(Transport):
    """A deque in a Ray actor, samples as cloudpickle: verl's message queue, bounded here by waiting."""

    name = "Ray actor deque, cloudpickle"
    needs_ray = True

    def setup(self, payload_bytes: int, depth: int) -> None:
        import ray

        self.actor = ray.remote(num_cpus=0, max_concurrency=20)(_Deque).remote(depth)

    def put(self, sample: Sample) -> None:
        import ray

        ray.get(
            self.actor.put.remote(ray.cloudpickle.dumps((arrays_of(sample), sample.group_id, sample.reward)))
        )

    def get(self) -> Received:
        import ray

        received: Received = ray.cloudpickle.loads(ray.get(self.actor.get.remote()))
        return received

    def close(self) -> None:
        import ray

        ray.kill(self.actor)


class _Deque:
    def __init__(self, depth: int) -> None:
        self.items: collections.deque[bytes] = collections.deque()
        self.depth = depth
        self.changed = asyncio.Condition()

    async def put(self, item: bytes) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.items) < self.depth)
            self.items.append(item)
            self.changed.notify_all()

    async def get(self) -> bytes:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.items) > 0)
            item = self.items.popleft()
            self.changed.notify_all()
            return item


class RayQueue(Transport):
    name = "ray.util.queue"
    needs_ray = True

    def setup(self, payload_bytes: int, depth: int) -> None:
        from ray.util.queue import Queue

        self.queue = Queue(maxsize=depth, actor_options={"num_cpus": 0})

    def put(self, sample: Sample) -> None:
        self.queue.put((arrays_of(sample), sample.group_id, sample.reward))

    def get(self) -> Received:
        received: Received = self.queue.get()
        return received

    def close(self) -> None:
        self.queue.shutdown(force=True)
