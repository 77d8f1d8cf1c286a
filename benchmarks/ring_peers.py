"""What one would use instead of the ring: queues of processes, sockets, shared memory, actors."""

from __future__ import annotations

import asyncio
import collections
import ctypes
import pickle
import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from ring_transports import ARRAYS, Received, Transport, arrays_of, make_sample

from asyncrl.data.torchvision_ops import declare_torchvision_operators
from asyncrl.types import Sample


class MpQueue(Transport):
    """multiprocessing.Queue: one for all runs, for it is given to a process when that is started."""

    name = "multiprocessing.Queue"

    def inherit(self, handles: Mapping[str, Any]) -> None:
        self.queue = handles[self.name]

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def put(self, sample: Sample) -> None:
        self.queue.put((arrays_of(sample), sample.group_id, sample.reward))

    def get(self) -> Received:
        received: Received = self.queue.get()
        return received


class TorchQueue(MpQueue):
    """torch.multiprocessing.Queue: tensors go through shared memory of their own."""

    name = "torch.multiprocessing.Queue"

    def put(self, sample: Sample) -> None:
        import torch

        tensors = {name: torch.from_numpy(array) for name, array in arrays_of(sample).items()}
        self.queue.put((tensors, sample.group_id, sample.reward))

    def get(self) -> Received:
        tensors, seq, sent = self.queue.get()
        return {name: tensor.numpy() for name, tensor in tensors.items()}, seq, sent


def queues(context: Any, depth: int, transports: set[type[Transport]]) -> dict[str, Any]:
    """The queues that `MpQueue` and its like inherit."""
    made = {}
    if MpQueue in transports:
        made[MpQueue.name] = context.Queue(depth)
    if TorchQueue in transports:
        import torch.multiprocessing

        made[TorchQueue.name] = torch.multiprocessing.get_context(context.get_start_method()).Queue(depth)
    return made


class VllmMessageQueue(Transport):
    """vLLM's shared-memory MessageQueue, in the copy that SGLang carries; one writer, which makes it."""

    name = "vLLM MessageQueue"
    max_producers = 1

    def setup(self, payload_bytes: int, depth: int) -> None:
        self.chunk_bytes, self.depth = payload_bytes + 4096, depth
        self.directory = tempfile.mkdtemp(prefix="asyncrl-bench-")

    def __getstate__(self) -> dict[str, Any]:
        return {"chunk_bytes": self.chunk_bytes, "depth": self.depth, "directory": self.directory}

    def connect_producer(self) -> None:
        self.queue = _message_queue()(1, 1, max_chunk_bytes=self.chunk_bytes, max_chunks=self.depth)
        handle = Path(self.directory, "handle")
        handle.with_suffix(".partial").write_bytes(pickle.dumps(self.queue.export_handle()))
        handle.with_suffix(".partial").rename(handle)
        self.queue.wait_until_ready()

    def put(self, sample: Sample) -> None:
        self.queue.enqueue((arrays_of(sample), sample.group_id, sample.reward))

    def connect_reader(self) -> None:
        handle = Path(self.directory, "handle")
        deadline = time.monotonic() + 120
        while not handle.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the writer of vLLM's MessageQueue did not come within 120 s")
            time.sleep(0.01)
        self.queue = _message_queue().create_from_handle(pickle.loads(handle.read_bytes()), 0)
        self.queue.wait_until_ready()

    def get(self) -> Received:
        received: Received = self.queue.dequeue()
        return received

    def close(self) -> None:
        vars(self).pop("queue", None)
        shutil.rmtree(self.directory)


def _message_queue() -> Any:
    declare_torchvision_operators()  # without them SGLang cannot be imported beside a CPU build of torch
    from sglang.srt.distributed.device_communicators.shm_broadcast import MessageQueue

    return MessageQueue


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
        while self._send(sample) == 0:  # the reader's connection is not there yet: nobody got it
            time.sleep(0.001)
        self.notifier.notify()

    def _send(self, sample: Sample) -> int:
        """Returns how many subscribers have it."""
        loan = self.publisher.loan_slice_uninit(self.frame)
        bytes_ = np.frombuffer(loan.payload().as_memory_view(), np.uint8)
        bytes_[:8].view(np.int64)[0] = sample.num_tokens
        bytes_[8:16].view(np.int64)[0] = sample.group_id
        bytes_[16:24].view(np.float64)[0] = sample.reward
        at = 64
        for array in arrays_of(sample).values():
            bytes_[at : at + array.nbytes].view(array.dtype)[:] = array
            at += -(-array.nbytes // 64) * 64
        reached: int = loan.assume_init().send()
        return reached

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
    """A deque in a Ray actor, samples as cloudpickle: verl's message queue, bounded here by waiting.

    One actor serves all runs: each leaves it empty.
    """

    name = "Ray actor deque, cloudpickle"
    needs_ray = True
    made: ClassVar[dict[int, Any]] = {}

    def setup(self, payload_bytes: int, depth: int) -> None:
        import ray

        if depth not in self.made:
            self.made[depth] = ray.remote(num_cpus=0, max_concurrency=20)(_Deque).remote(depth)
        self.actor = self.made[depth]

    def put(self, sample: Sample) -> None:
        import ray

        ray.get(
            self.actor.put.remote(ray.cloudpickle.dumps((arrays_of(sample), sample.group_id, sample.reward)))
        )

    def get(self) -> Received:
        import ray

        received: Received = ray.cloudpickle.loads(ray.get(self.actor.get.remote()))
        return received


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
    """One for all runs, as the deque above."""

    name = "ray.util.queue"
    needs_ray = True
    made: ClassVar[dict[int, Any]] = {}

    def setup(self, payload_bytes: int, depth: int) -> None:
        from ray.util.queue import Queue

        if depth not in self.made:
            self.made[depth] = Queue(maxsize=depth, actor_options={"num_cpus": 0})
        self.queue = self.made[depth]

    def put(self, sample: Sample) -> None:
        self.queue.put((arrays_of(sample), sample.group_id, sample.reward))

    def get(self) -> Received:
        received: Received = self.queue.get()
        return received
