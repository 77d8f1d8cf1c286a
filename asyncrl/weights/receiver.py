"""The engine's side of a publication: buckets off the wire, straight into the live parameters of one rank.

    connect: manifest (name, shape, dtype of every live parameter) -> first sender
             instructions (buckets, segments, plan hash)           <- first sender
    receive: from each sender: header (version, base, plan hash), buckets, digests
             two staging buffers: while one bucket is unpacked the next one arrives
    stage:   the same on a thread of its own, into a second copy of the parameters; the live ones serve
             meanwhile. The first sender is told whether this rank has verified the version
    take:    the copy replaces the live parameters, once all ranks of the engine agree that they have it
    changes: with a base, the rank packs the bucket that it holds, changes it, and unpacks it as any other.
             The digests are of the whole bucket, so a base that is not what the sender thinks shows in them

A version counts as received only when every rank of the engine has verified the digest of every parameter;
otherwise `WeightUpdateError` is raised on all ranks, and the weights may be partly new: the engine must not
serve until it has received a whole version.

This module runs inside the engine's process, whose environment may hold nothing of ours but this file, the
routes, the second copy, the wire format and the extension.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.weights.copies import BucketCopies
from asyncrl.weights.routes import Direct, Link, LinkOrder, Route, route_over
from asyncrl.weights.second_copy import Place, SecondCopy
from asyncrl.weights.wire import (
    EMPTY_HEADER,
    FAILED,
    NO_BASE,
    NO_LINK,
    VERIFIED,
    WHOLE,
    Deadline,
    Header,
    WeightUpdateError,
    apply_changes,
    bytes_per_change,
    receive_message,
    send_message,
    staging,
    start_receive,
    start_send,
    transfer_device,
)


@dataclass(frozen=True, slots=True)
class _ReceiverBucket:
    sender: int
    num_bytes: int
    copies: BucketCopies

    def num_bytes_of(self, count: int) -> int:
        """What arrives for so many changes, or for WHOLE."""
        return self.num_bytes if count == WHOLE else count * bytes_per_change(self.num_bytes)

    def whole(
        self, live: Sequence[torch.Tensor], arrived: torch.Tensor, count: int, held: torch.Tensor
    ) -> torch.Tensor:
        """The bucket's bytes; ``held`` is room for the bucket as the live parameters have it."""
        if count == WHOLE:
            return arrived[: self.num_bytes]
        whole = held[: self.num_bytes]
        self.copies.pack(live, whole, torch.zeros(len(live), dtype=torch.int64, device=held.device))
        apply_changes(whole, arrived[: self.num_bytes_of(count)], count)
        return whole


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
        self._held = NO_BASE  # the version that was verified last
        self._second: SecondCopy | None = None
        self._link: Link | None = None

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
        held, self._held = self._held, NO_BASE
        deadline = Deadline(timeout_s)
        self._together(lambda: self._transfer(version, held, plan_hash, deadline, self._order), what)
        self._held = version

    def stage(self, version: int, plan_hash: str, timeout_s: float, place: Place) -> None:
        """Begin to receive one version beside the live parameters; returns at once.

        The first sender hears whether this rank has verified it.

        Raises:
            WeightUpdateError: a version is still arriving.
        """
        if self._second is None:
            self._second = SecondCopy(self._order, place)
        deadline = Deadline(timeout_s)
        self._second.begin(version, lambda copy: self._arrive(version, plan_hash, deadline, copy))

    def take(self, version: int, timeout_s: float) -> None:
        """Replace the live parameters by the version that was staged.

        Raises:
            WeightUpdateError: on every rank of the engine, where any of them has not verified it; the live
                parameters are as they were.
        """
        second = self._second

        def check() -> None:
            if second is None:
                raise WeightUpdateError("nothing was staged")
            second.require(version, Deadline(timeout_s))

        self._together(check, f"taking version {version}")
        assert second is not None, "checked above"
        second.copy_to(self._order)
        self._held = version

    def link(self, order: LinkOrder, tp_rank: int) -> None:
        """Begin to join a link with the same ranks of other engines, instead of the last; returns at once.

        The link's store hears when this rank has joined.
        """
        self._link = Link(order, tp_rank, self._link)

    def close(self) -> None:
        """Wait for a version that still arrives, at most until its deadline: the groups will be left."""
        if self._second is not None:
            self._second.close()
        if self._link is not None:
            self._link.close()

    def _arrive(self, version: int, plan_hash: str, deadline: Deadline, copy: Sequence[torch.Tensor]) -> None:
        """Receive into the second copy, and tell the first sender how that went."""
        try:
            self._transfer(version, self._held, plan_hash, deadline, copy)
        except (RuntimeError, ValueError):
            self._tell(FAILED, deadline)
            raise
        self._tell(VERIFIED, deadline)

    def _tell(self, result: int, deadline: Deadline) -> None:
        word = torch.tensor([result], dtype=torch.int64, device=transfer_device(self._group))
        deadline.wait(start_send(self._group, self._senders[0], word), "telling the first sender the result")

    def _together(self, action: Callable[[], None], what: str) -> None:
        failure: Exception | None = None
        try:
            action()
        except (RuntimeError, ValueError) as error:  # of ours, of torch's transport, of a malformed program
            failure = error
        if self._all_agree(failure is None):
            return
        reason = str(failure) if failure is not None else "another rank of this engine failed"
        try:
            raise WeightUpdateError(f"{what}: {reason}") from failure
        finally:
            del failure  # a cycle with its own traceback would keep a group open that is left

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

    def _transfer(
        self, version: int, held: int, plan_hash: str, deadline: Deadline, target: Sequence[torch.Tensor]
    ) -> None:
        if plan_hash != self._plan_hash:
            raise WeightUpdateError(
                f"the publication follows plan {plan_hash[:12]}, this rank knows {self._plan_hash[:12]}"
            )
        senders = sorted({bucket.sender for bucket in self._buckets})
        told = {self._check_header(sender, version, held, deadline) for sender in senders}
        if len(told) > 1:
            raise WeightUpdateError(f"the senders tell different things: {sorted(map(str, told))}")
        header = told.pop() if told else EMPTY_HEADER
        for shard_idx, first_row in self._padding:
            target[shard_idx][first_row:].zero_()
        route: Route = Direct(self._group, deadline)
        if header.link != NO_LINK:
            route = route_over(self._group, self._link, header.link, deadline)
        received, failure = self._receive_buckets(deadline, target, route, header.base != NO_BASE)
        sent = self._receive_digests(senders, deadline)
        if failure:
            raise WeightUpdateError(failure)
        self._verify(received, sent)

    def _check_header(self, sender: int, version: int, held: int, deadline: Deadline) -> Header:
        """Returns what the sender announces: changes of which version, and over which link."""
        numbers = torch.zeros_like(EMPTY_HEADER.encode(), device=transfer_device(self._group))
        what = f"waiting for version {version} of sender {sender}"
        deadline.wait(start_receive(self._group, sender, numbers), what)
        header = Header.decode(numbers)
        if (header.version, header.plan_hash) != (version, self._plan_hash):
            raise WeightUpdateError(f"sender {sender} sends version {header.version}, or by another plan")
        if header.base not in (NO_BASE, held):
            holds = "no verified version" if held == NO_BASE else f"version {held}"
            raise WeightUpdateError(
                f"sender {sender} tells changes of version {header.base}, this rank holds {holds}"
            )
        return header

    def _receive_buckets(
        self, deadline: Deadline, target: Sequence[torch.Tensor], route: Route, as_changes: bool
    ) -> tuple[torch.Tensor, str]:
        """Unpack all buckets in the plan's order.

        Returns the digest of each parameter as it arrived, and which replica failed, if one did, and how.
        """
        device = transfer_device(self._group)
        digests = torch.zeros(len(self._order), dtype=torch.int64, device=device)
        largest = max((bucket.num_bytes for bucket in self._buckets), default=0)
        spaces = staging(2, largest, device)
        held = staging(1, largest if as_changes else 0, device)[0]
        counts: list[int] = []
        for bucket_idx in range(len(self._buckets) + 1):
            if bucket_idx < len(self._buckets):
                bucket = self._buckets[bucket_idx]
                counts.append(self._receive_count(bucket_idx, deadline) if as_changes else WHOLE)
                space = spaces[bucket_idx % 2, : bucket.num_bytes_of(counts[-1])]
                route.begin(bucket_idx, bucket.sender, space)
            if bucket_idx > 0:
                is_whole = route.complete(bucket_idx - 1)
                bucket, space = self._buckets[bucket_idx - 1], spaces[(bucket_idx - 1) % 2]
                if is_whole:
                    packed = bucket.whole(self._order, space, counts[bucket_idx - 1], held)
                    bucket.copies.unpack(target, packed, digests)
        return digests, route.finish()

    def _receive_count(self, bucket_idx: int, deadline: Deadline) -> int:
        bucket = self._buckets[bucket_idx]
        count = torch.zeros(1, dtype=torch.int64, device=transfer_device(self._group))
        what = f"waiting for the size of bucket {bucket_idx} of sender {bucket.sender}"
        deadline.wait(start_receive(self._group, bucket.sender, count), what)
        if int(count) < WHOLE or bucket.num_bytes_of(int(count)) > bucket.num_bytes:
            raise WeightUpdateError(f"sender {bucket.sender} announced {int(count)} changes in a bucket")
        return int(count)

    def _receive_digests(self, senders: Sequence[int], deadline: Deadline) -> torch.Tensor:
        """The sum over all senders."""
        total = torch.zeros(len(self._order), dtype=torch.int64, device=transfer_device(self._group))
        for sender in senders:
            part = torch.zeros_like(total)
            what = f"waiting for the digests of sender {sender}"
            deadline.wait(start_receive(self._group, sender, part), what)
            total += part
        return total

    def _verify(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        wrong = (received != sent).nonzero().flatten().tolist()
        if wrong:
            raise WeightUpdateError(
                f"{self._names[wrong[0]]} did not arrive as it was sent"
                f" ({len(wrong)} of {len(self._names)} digests differ)"
            )
