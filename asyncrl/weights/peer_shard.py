"""What both sides of a refill share: the shard that a rank holds, how it is cut, and where two ranks meet.

`asyncrl.weights.peers` draws the flow. This module runs inside the engine's process: it imports what
`asyncrl.weights.receiver` may, and that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from asyncrl.weights.copies import BucketCopies
from asyncrl.weights.groups import join_at, reach_store
from asyncrl.weights.wire import Deadline, WeightUpdateError

PIECE_ALIGNMENT = 16  # in a bucket; the widest copy
SOURCE, TARGET = 0, 1  # ranks of the group of two
POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank of an engine meets the same rank of the other."""

    host: str
    port: int
    group: str
    tp_rank: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}, rank {self.tp_rank}"

    @property
    def pair(self) -> str:
        """The name of the group of the two ranks."""
        return f"{self.group}-{self.tp_rank}"

    @classmethod
    def at(cls, address: str, group: str, tp_rank: int) -> Place:
        """``address`` is "host:port"."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise WeightUpdateError(f"{address!r} is no address of an engine that gives its weights")
        return cls(host, int(port), group, tp_rank)


def reach(place: Place, deadline: Deadline) -> Store:
    """The store of a source, which listened before it told its address.

    Raises:
        WeightUpdateError: it is gone.
    """
    try:  # torch would go on trying
        socket.create_connection((place.host, place.port), max(POLL_S, deadline.left_s)).close()
    except OSError as error:
        raise WeightUpdateError(f"the source is gone: {error}") from error
    # torch may need five seconds to connect. A store that dies just now costs it its time-out twice: for the
    # connection, and for its first answer.
    return reach_store(place.host, place.port, max(POLL_S, deadline.left_s))


class Shard:
    """One rank's parameters, in an order that both engines share.

    Raises:
        WeightUpdateError: a parameter cannot be moved as plain bytes.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.names = sorted(parameters)
        self.tensors = [parameters[name].detach() for name in self.names]
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self.on_cuda = self.device.type == "cuda"
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if not tensor.is_contiguous() or tensor.element_size() not in (1, 2, 4, 8):
                raise WeightUpdateError(f"{name} is not contiguous, or of {tensor.dtype}; it cannot be moved")
            if tensor.device != self.device:
                raise WeightUpdateError(f"{name} is on {tensor.device}, {self.names[0]} on {self.device}")

    @property
    def described(self) -> list[list[object]]:
        """As JSON brings it back."""
        return [
            [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in zip(self.names, self.tensors, strict=True)
        ]

    def cut(self, bucket_bytes: int) -> list[tuple[int, BucketCopies]]:
        """The buckets and their sizes: of at most ``bucket_bytes``, or of one row."""
        buckets: list[tuple[int, BucketCopies]] = []
        table, end = array("q"), 0

        def close() -> None:
            buckets.append((end, BucketCopies(table, self.tensors, end, len(self.tensors))))

        for idx, tensor in enumerate(self.tensors):
            cols = tensor.shape[-1] if tensor.dim() else 1
            size, row = tensor.element_size(), 0
            rows = tensor.numel() // cols if cols else 0
            while row < rows:
                begin = -(-end // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
                room = (bucket_bytes - begin) // (cols * size)
                if room < 1 and end > 0:
                    close()
                    table, end = array("q"), 0
                    continue
                count, first = min(rows - row, max(1, room)), row * cols
                # As csrc/reshard/index.h's Segment; an operation that copies is numbered by its size.
                table.extend((idx, first, cols, count, cols, begin, first, cols, idx, size))
                end, row = begin + count * cols * size, row + count
        if end:
            close()
        return buckets

    def deadline(self, timeout_s: float) -> Deadline:
        return _PolledDeadline(timeout_s) if self.on_cuda else Deadline(timeout_s)

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        """On the device that holds the parameters, beside the stream that samples."""
        if not self.on_cuda:
            yield
            return
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                yield
            stream.synchronize()


class _PolledDeadline(Deadline):
    """NCCL's own waits keep no deadline: they let a stream wait, and return."""

    def wait(self, work: dist.Work, what: str) -> None:
        while not work.is_completed():
            if self.left_s <= 0:
                raise WeightUpdateError(f"{what}: not within {self.timeout_s:.0f} s")
            time.sleep(POLL_S)
        super().wait(work, what)


def compare(given: Sequence[Sequence[object]], own: Sequence[Sequence[object]]) -> None:
    """Raise WeightUpdateError with the first difference between two manifests."""
    theirs, ours = ({str(name): rest for name, *rest in side} for side in (given, own))
    for name in sorted(theirs.keys() | ours.keys()):
        there, here = theirs.get(name, ["missing"]), ours.get(name, ["missing"])
        if there != here:
            raise WeightUpdateError(f"{name} is {there} at the source, {here} on this rank")


@contextlib.contextmanager
def pair_group(
    store: Store, place: Place, rank: int, deadline: Deadline, on_cuda: bool
) -> Iterator[dist.ProcessGroup]:
    """The group of two ranks, which is left at the end."""
    with _nccl_spares_this_process() if on_cuda else contextlib.nullcontext():
        backend = "nccl" if on_cuda else "gloo"
        group = join_at(store, place.pair, rank, 2, backend, max(POLL_S, deadline.left_s))
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


@contextlib.contextmanager
def _nccl_spares_this_process() -> Iterator[None]:
    """NCCL's watchdog ends a process whose peer dies; a replica must outlive the one that it helps.

    A group reads the variable when it is made.
    """
    variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(variable)
    os.environ[variable] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
