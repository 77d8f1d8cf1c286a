"""What trainer and engine ranks say to each other in a publication, defined here for both sides.

    messages:  a length, then the bytes (manifests, instructions)
    header:    version, base, link, plan hash; precedes the buckets of every pair
    bucket:    packed bytes, whole or a stripe of them (`asyncrl.weights.routes`). Where the header names a
               base, the version whose bucket the receiver holds, it is preceded by the number of changes, or
               WHOLE, and may be told as changes
    digests:   one int64 per parameter of the receiver, always of whole buckets
    result:    VERIFIED or FAILED, from a receiver to the first sender, of a version that was staged

Every wait is under a `Deadline`. This module runs inside the engine's process, whose environment may hold
nothing of ours but this file, the receiver and the extension.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

MAX_MESSAGE_BYTES = 1 << 31
"""Longest manifest or instructions; a larger announced length is a protocol error."""


STAGING_ALIGNMENT = 256
NO_BASE = -1
NO_LINK = 0
WHOLE = -1
SMALLEST_CHUNK, MOST_CHUNKS = 128 << 10, 256
FAILED, VERIFIED = 0, 1


class WeightUpdateError(RuntimeError):
    """A rank could not send or receive a version; the message names the peer or the parameter."""


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds; negative once it has passed."""
        return self._end - time.monotonic()

    def wait(self, work: dist.Work, what: str) -> None:
        """Finish a transfer, or raise `WeightUpdateError` that says what did not happen."""
        left = self.left_s
        if left <= 0:
            raise WeightUpdateError(f"{what}: not within {self.timeout_s:.0f} s")
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise WeightUpdateError(f"{what}: {_first_line(error)}") from error


def transfer_device(group: dist.ProcessGroup) -> torch.device:
    """Where tensors must lie that this group moves."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def start_send(group: dist.ProcessGroup, peer: int, data: torch.Tensor) -> dist.Work:
    """Begin sending; ``data`` must stay unchanged until the work is finished."""
    return _started(lambda: dist.isend(data, group=group, group_dst=peer), peer)


def start_receive(group: dist.ProcessGroup, peer: int, data: torch.Tensor) -> dist.Work:
    """Begin receiving into ``data``."""
    return _started(lambda: dist.irecv(data, group=group, group_src=peer), peer)


def start_exchange(
    group: dist.ProcessGroup, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
) -> list[dist.Work]:
    """Begin to send and to receive, by peer, together: peers who do the same cannot wait in a circle."""
    operations = [dist.P2POp(dist.irecv, data, group=group, group_peer=p) for p, data in receives.items()]
    operations += [dist.P2POp(dist.isend, data, group=group, group_peer=p) for p, data in sends.items()]
    try:
        return dist.batch_isend_irecv(operations) if operations else []
    except RuntimeError as error:
        raise WeightUpdateError(f"a peer of the exchange is gone: {_first_line(error)}") from error


def stripe(data: torch.Tensor, idx: int, count: int) -> torch.Tensor:
    """The ``idx``-th of ``count`` equal parts of a bucket, uint8; a view."""
    return data[len(data) * idx // count : len(data) * (idx + 1) // count]


def chunks(data: torch.Tensor) -> list[torch.Tensor]:
    """The pieces in which a bucket, uint8, goes from replica to replica; views."""
    return list(torch.split(data, chunk_bytes(len(data)))) if len(data) else []


def chunk_bytes(num_bytes: int) -> int:
    """Of a bucket of so many bytes: short, so that whoever is last in a chain does not wait for long; but few
    enough, for each costs a call."""
    return max(SMALLEST_CHUNK, num_bytes // MOST_CHUNKS)


def _started(start: Callable[[], dist.Work | None], peer: int) -> dist.Work:
    try:
        work = start()
    except RuntimeError as error:  # the connection is known to be closed
        raise WeightUpdateError(f"rank {peer} of the weight group is gone: {_first_line(error)}") from error
    if work is None:
        raise WeightUpdateError("this process is no member of the weight group")
    return work


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def send_message(group: dist.ProcessGroup, peer: int, message: bytes, deadline: Deadline) -> None:
    """Send a length, then the bytes."""
    device = transfer_device(group)
    body = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
    length = torch.tensor([len(message)], dtype=torch.int64, device=device)
    for part in (length, body):
        deadline.wait(start_send(group, peer, part), f"sending {len(message)} bytes to rank {peer}")


def receive_message(group: dist.ProcessGroup, peer: int, deadline: Deadline) -> bytes:
    """Receive what `send_message` sent."""
    device = transfer_device(group)
    length = torch.zeros(1, dtype=torch.int64, device=device)
    deadline.wait(start_receive(group, peer, length), f"waiting for a message of rank {peer}")
    num_bytes = int(length.item())
    if not 0 < num_bytes <= MAX_MESSAGE_BYTES:
        raise WeightUpdateError(f"rank {peer} announced a message of {num_bytes} bytes")
    body = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    deadline.wait(start_receive(group, peer, body), f"waiting for {num_bytes} bytes of rank {peer}")
    return bytes(body.cpu().numpy())


@dataclass(frozen=True, slots=True)
class Header:
    """What precedes the buckets of every pair.

    ``link`` numbers the link over which replicas pass buckets on to each other, or is NO_LINK.
    """

    version: int
    base: int
    link: int
    plan_hash: str  # SHA-256

    def encode(self) -> torch.Tensor:
        """int64[7]."""
        numbers = array("q", [self.version, self.base, self.link])
        numbers.frombytes(bytes.fromhex(self.plan_hash))
        return torch.tensor(numbers.tolist(), dtype=torch.int64)

    @staticmethod
    def decode(numbers: torch.Tensor) -> Header:
        """Of what `encode` made."""
        version, base, link, *words = numbers.tolist()
        return Header(version, base, link, array("q", words).tobytes().hex())


EMPTY_HEADER = Header(0, NO_BASE, NO_LINK, "00" * 32)


def staging(count: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Buffers of at least ``num_bytes``, uint8 [count, ...]; each begins where the widest copies may."""
    stride = -(-num_bytes // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
    return torch.empty(count, stride, dtype=torch.uint8, device=device)


def changes_between(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    """What turns one bucket, uint8, into another of its size; None where that is no shorter than the bucket.

    n int32 indices of the units that differ, then their n new values; a unit has `unit_of` bytes.
    """
    unit = unit_of(new)
    values = new.view(unit)
    changed = (values != old.view(unit)).nonzero().flatten()
    if len(changed) * bytes_per_change(len(new)) >= len(new):
        return None
    return torch.cat([changed.to(torch.int32).view(torch.uint8), values[changed].view(torch.uint8)])


def apply_changes(bucket: torch.Tensor, changes: torch.Tensor, count: int) -> None:
    """Turn the old bucket, uint8, into the new one.

    Raises:
        WeightUpdateError: a change lies outside of the bucket.
    """
    values = bucket.view(unit_of(bucket))
    changed = changes[: 4 * count].view(torch.int32)
    if count and not 0 <= int(changed.min()) <= int(changed.max()) < len(values):
        raise WeightUpdateError(f"a change lies outside of a bucket of {len(bucket)} bytes")
    values[changed.long()] = changes[4 * count :].view(values.dtype)


def bytes_per_change(num_bytes: int) -> int:
    """Of a bucket of so many bytes."""
    return 4 + (2 if num_bytes % 2 == 0 else 1)


def unit_of(bucket: torch.Tensor) -> torch.dtype:
    """What changes are counted in: pairs of bytes where the bucket has an even number of them."""
    return torch.int16 if len(bucket) % 2 == 0 else torch.uint8
