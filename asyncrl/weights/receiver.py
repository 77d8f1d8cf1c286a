"""The engine's side of a publication: buckets off the wire, straight into the live parameters of one rank.

    connect: manifest (name, shape, dtype of every live parameter) -> first sender
             instructions (buckets, segments, plan hash)           <- first sender
    receive: from each sender: header (version, plan hash), buckets, digests
             two staging buffers: while one bucket is unpacked the next one arrives

A version counts as received only when every rank of the engine has verified the digest of every parameter;
otherwise `WeightUpdateError` is raised on all ranks, and the weights may be partly new: the engine must not
serve until it has received a whole version.

This module runs inside the engine's process, whose environment may hold nothing of ours but this file and the
extension: it imports torch and `asyncrl._C` alone. The wire format is defined here for both sides.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import asyncrl._C as _C

MAX_MESSAGE_BYTES = 1 << 31
"""Longest manifest or instructions; a larger announced length is a protocol error."""


STAGING_ALIGNMENT = 256


class WeightUpdateError(RuntimeError):
    """A rank could not send or receive a version; the message names the peer or the parameter."""


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def wait(self, work: dist.Work, what: str) -> None:
        """Finish a transfer, or raise `WeightUpdateError` that says what did not happen."""
        left = self._end - time.monotonic()
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


def header_of(version: int, plan_hash: str) -> torch.Tensor:
    """What precedes the buckets of every pair: int64[5], the version and the plan's SHA-256."""
    numbers = array("q", [version])
    numbers.frombytes(bytes.fromhex(plan_hash))
    return torch.tensor(numbers.tolist(), dtype=torch.int64)


def staging_pair(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Two buffers of at least ``num_bytes``, uint8; both begin where the widest copies may."""
    stride = -(-num_bytes // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
    return torch.empty(2, stride, dtype=torch.uint8, device=device)


class BucketCopies:
    """The copies between one bucket and this rank's parameters, run on the device that holds them.

    ``table`` has ten int64 fields per segment, as csrc/reshard/index.h's Segment orders them;
    ``block_scales`` five per segment that quantises, as BlockScales orders them.
    """

    def __init__(
        self,
        table: array[int],
        parameters: Sequence[torch.Tensor],
        num_bytes: int,
        num_digests: int,
        block_scales: array[int] | None = None,
    ) -> None:
        self._parameters = parameters
        sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        program = _C.CopyProgram(table, sizes, num_bytes, num_digests, block_scales)
        on_cuda = bool(parameters) and parameters[0].is_cuda
        if on_cuda and not _C.with_cuda:
            raise WeightUpdateError("asyncrl._C was built without CUDA; rebuild it where nvcc is found")
        self._program = _C.CudaProgram(program) if on_cuda else program
        self._on_cuda = on_cuda

    def pack(self, space: torch.Tensor, digests: torch.Tensor) -> None:
        """Fill a bucket, uint8, and add to the digests, int64."""
        self._program.pack(*self._arguments(space, digests))

    def unpack(self, space: torch.Tensor, digests: torch.Tensor) -> None:
        """Write the parameters from a bucket, uint8, and add to the digests, int64."""
        self._program.unpack(*self._arguments(space, digests))

    def _arguments(self, space: torch.Tensor, digests: torch.Tensor) -> tuple[Any, ...]:
        # Addresses are read every time: a parameter's storage may have been replaced since.
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        stream = (torch.cuda.current_stream().cuda_stream,) if self._on_cuda else ()
        return addresses, space.data_ptr(), digests.data_ptr(), *stream


@dataclass(frozen=True, slots=True)
class _ReceiverBucket:
    sender: int
    num_bytes: int
    copies: BucketCopies


class Receiver:
    """Receives versions into one engine rank's live parameters.

    Args:
        parameters: the rank's own parameters by name; contiguous float32 or bfloat16, written in place.
        group: the weight group shared with the trainer; its ranks are the senders, then the engine's ranks.
        sender_ranks: ranks of the trainer in ``group``.
        all_agree: true where the argument is true on every rank of the engine; called by all ranks together.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        sender_ranks: Sequence[int],
        all_agree: Callable[[bool], bool],
    ) -> None:
        self._parameters = dict(parameters)
        self._group = group
        self._senders = tuple(sender_ranks)
        self._all_agree = all_agree
        self._plan_hash = ""
        self._order: list[torch.Tensor] = []  # parameters as the plan numbers them
        self._names: list[str] = []
        self._padding: list[tuple[int, int]] = []
        self._buckets: list[_ReceiverBucket] = []

    def connect(self, timeout_s: float) -> None:
        """Report what this rank holds and take the plan's instructions.

        Raises:
            WeightUpdateError: on every rank of the engine, where any of them failed.
        """
        self._together(lambda: self._exchange(Deadline(timeout_s)), "joining the weight group")

    def receive(self, version: int, plan_hash: str, timeout_s: float) -> None:
        """Take one version into the live parameters and verify it.

        Raises:
            WeightUpdateError: on every rank of the engine, where any of them failed; the weights may then be
                partly new and the weight group must be left.
        """
        what = f"receiving version {version}"
        self._together(lambda: self._transfer(version, plan_hash, Deadline(timeout_s)), what)

    def _together(self, action: Callable[[], None], what: str) -> None:
        failure: Exception | None = None
        try:
            action()
        except (RuntimeError, ValueError) as error:  # of ours, of torch's transport, of a malformed program
            failure = error
        if self._all_agree(failure is None):
            return
        reason = str(failure) if failure is not None else "another rank of this engine failed"
        raise WeightUpdateError(f"{what}: {reason}") from failure

    def _exchange(self, deadline: Deadline) -> None:
        device = transfer_device(self._group).type
        for name, tensor in self._parameters.items():
            if tensor.device.type != device:
                raise WeightUpdateError(
                    f"{name} is on {tensor.device}, the weight group moves {device} tensors"
                )
            if not tensor.is_contiguous():
                raise WeightUpdateError(f"{name} is not contiguous, so it cannot be received in place")
        manifest = [
            [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in self._parameters.items()
        ]
        send_message(self._group, self._senders[0], json.dumps(manifest).encode(), deadline)
        self._take_instructions(json.loads(receive_message(self._group, self._senders[0], deadline)))

    def _take_instructions(self, instructions: Mapping[str, Any]) -> None:
        if "refused" in instructions:
            raise WeightUpdateError(instructions["refused"])
        self._names = list(instructions["parameters"])
        self._order = [self._parameters[name].detach() for name in self._names]
        self._padding = [(shard_idx, row) for shard_idx, row in instructions["padding"]]
        self._buckets = [
            _ReceiverBucket(
                item["sender"],
                item["num_bytes"],
                BucketCopies(array("q", item["segments"]), self._order, item["num_bytes"], len(self._order)),
            )
            for item in instructions["buckets"]
        ]
        self._plan_hash = instructions["plan_hash"]

    def _transfer(self, version: int, plan_hash: str, deadline: Deadline) -> None:
        if plan_hash != self._plan_hash:
            raise WeightUpdateError(
                f"the publication follows plan {plan_hash[:12]}, this rank knows {self._plan_hash[:12]}"
            )
        senders = sorted({bucket.sender for bucket in self._buckets})
        for sender in senders:
            self._check_header(sender, version, deadline)
        for shard_idx, first_row in self._padding:
            self._order[shard_idx][first_row:].zero_()
        digests = self._receive_buckets(deadline)
        self._verify(digests, senders, deadline)

    def _check_header(self, sender: int, version: int, deadline: Deadline) -> None:
        expected = header_of(version, self._plan_hash)
        header = torch.zeros_like(expected, device=transfer_device(self._group))
        what = f"waiting for version {version} of sender {sender}"
        deadline.wait(start_receive(self._group, sender, header), what)
        if not torch.equal(header.cpu(), expected):
            raise WeightUpdateError(f"sender {sender} sends version {int(header[0])}, or by another plan")

    def _receive_buckets(self, deadline: Deadline) -> torch.Tensor:
        """Unpack all buckets in the plan's order; returns the digest of each parameter as it arrived."""
        digests = torch.zeros(len(self._order), dtype=torch.int64, device=transfer_device(self._group))
        largest = max((bucket.num_bytes for bucket in self._buckets), default=0)
        staging = staging_pair(largest, transfer_device(self._group))
        arriving: list[tuple[dist.Work, str]] = []
        for bucket_idx in range(len(self._buckets) + 1):
            if bucket_idx < len(self._buckets):
                bucket = self._buckets[bucket_idx]
                space = staging[bucket_idx % 2, : bucket.num_bytes]
                what = f"waiting for bucket {bucket_idx} of sender {bucket.sender}"
                arriving.append((start_receive(self._group, bucket.sender, space), what))
            if bucket_idx > 0:
                deadline.wait(*arriving[bucket_idx - 1])
                self._buckets[bucket_idx - 1].copies.unpack(staging[(bucket_idx - 1) % 2], digests)
        return digests

    def _verify(self, received: torch.Tensor, senders: Sequence[int], deadline: Deadline) -> None:
        expected = torch.zeros_like(received)
        for sender in senders:
            part = torch.zeros_like(received)
            what = f"waiting for the digests of sender {sender}"
            deadline.wait(start_receive(self._group, sender, part), what)
            expected += part
        wrong = (received != expected).nonzero().flatten().tolist()
        if wrong:
            raise WeightUpdateError(
                f"{self._names[wrong[0]]} did not arrive as it was sent"
                f" ({len(wrong)} of {len(self._names)} digests differ)"
            )
