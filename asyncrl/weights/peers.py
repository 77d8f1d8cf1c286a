"""One engine gives its live weights to another of the same layout, rank j to rank j, and samples on.

    source, a thread per rank             target, paused, every rank
    manifest (version, every parameter) ->  compared with its own parameters; all ranks agree
                                        <-  VERIFIED: go on, or FAILED
    buckets, packed two at a time       ->  unpacked into the live parameters while the next one arrives
    digest of each parameter            ->  compared; all ranks agree
                                        <-  VERIFIED or FAILED
    both leave the group, after a failure, too

TP rank 0 of the source hosts the store at which the ranks of both sides meet, until all of its own ranks have
left. A bucket is whole rows of parameters; both sides cut by the manifest, so there is nothing to plan.
Padding is copied like everything else.

Nothing is written before all ranks of the target have agreed on the manifest. Afterwards its weights may be
partly new until all of them have verified: it must not serve. The source only reads: what goes wrong ends its
thread, at the latest at the deadline.

This module runs inside the engine's process: it imports what `asyncrl.weights.receiver` may, and that.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from asyncrl.weights.groups import host_store
from asyncrl.weights.peer_shard import POLL_S, SOURCE, TARGET, Place, Shard, compare, pair_group, reach
from asyncrl.weights.wire import (
    FAILED,
    VERIFIED,
    Deadline,
    WeightUpdateError,
    receive_message,
    send_message,
    staging,
    start_receive,
    start_send,
)

BUCKET_BYTES = 64 << 20
UNABLE = 1 << 20  # more than any port
LEFT = "left"  # in the store: a key for each rank of the source that has

logger = logging.getLogger(__name__)


class Offer:
    """What one rank of the source offers, on a thread of its own; ``failure`` is known when it has ended."""

    def __init__(
        self, shard: Shard, place: Place, store: Store | None, num_ranks: int, version: int, timeout_s: float
    ) -> None:
        self._shard, self._place, self._store = shard, place, store
        self._num_ranks = num_ranks
        self._version = version
        self._timeout_s = timeout_s
        self._bucket_bytes = BUCKET_BYTES
        self.failure = ""
        self._thread = threading.Thread(target=self._run, name=f"give-{place.pair}", daemon=True)

    def begin(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended; it does so by its deadline."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        deadline = self._shard.deadline(self._timeout_s)
        try:
            store = self._store or reach(self._place, deadline)
            try:
                with (
                    self._shard.own_stream(),
                    pair_group(store, self._place, SOURCE, deadline, self._shard.on_cuda) as group,
                ):
                    self._give(group, deadline)
            finally:
                self._leave(store, deadline)
        except (RuntimeError, ValueError) as error:  # of ours, of torch's transport, of a malformed program
            self.failure = str(error).splitlines()[0]
            logger.warning("version %d was not given at %s: %s", self._version, self._place, self.failure)

    def _leave(self, store: Store, deadline: Deadline) -> None:
        """The store lives as long as a rank may need it."""
        store.set(f"{LEFT}/{self._place.tp_rank}", "1")
        if self._store is not None:
            everybody = [f"{LEFT}/{rank}" for rank in range(self._num_ranks)]
            with contextlib.suppress(RuntimeError):  # one died, or has no time left
                store.wait(everybody, timedelta(seconds=max(POLL_S, deadline.left_s)))

    def _give(self, group: dist.ProcessGroup, deadline: Deadline) -> None:
        manifest = {
            "version": self._version,
            "bucket_bytes": self._bucket_bytes,
            "parameters": self._shard.described,
        }
        send_message(group, TARGET, json.dumps(manifest).encode(), deadline)
        self._hear(group, f"version {self._version}", deadline)
        digests = self._send_buckets(group, deadline)
        deadline.wait(start_send(group, TARGET, digests), "the target taking digests")
        self._hear(group, "what it received", deadline)

    def _send_buckets(self, group: dist.ProcessGroup, deadline: Deadline) -> torch.Tensor:
        """Returns the digest of each parameter."""
        tensors, device = self._shard.tensors, self._shard.device
        digests = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        buckets = self._shard.cut(self._bucket_bytes)
        spaces = staging(2, max((num_bytes for num_bytes, _ in buckets), default=0), device)
        leaving: list[tuple[dist.Work, str]] = []
        for bucket_idx, (num_bytes, copies) in enumerate(buckets):
            if bucket_idx >= 2:
                deadline.wait(*leaving[bucket_idx - 2])
            space = spaces[bucket_idx % 2, :num_bytes]
            copies.pack(tensors, space, digests)
            leaving.append((start_send(group, TARGET, space), f"the target taking bucket {bucket_idx}"))
        for pending in leaving[-2:]:
            deadline.wait(*pending)
        return digests

    def _hear(self, group: dist.ProcessGroup, what: str, deadline: Deadline) -> None:
        word = torch.zeros(1, dtype=torch.int64, device=self._shard.device)
        deadline.wait(start_receive(group, TARGET, word), f"waiting for the target to judge {what}")
        if int(word) != VERIFIED:
            raise WeightUpdateError(f"the target refused {what}")


def give(
    parameters: Mapping[str, torch.Tensor],
    host: str,
    group: str,
    version: int,
    *,
    tp_rank: int,
    tp_size: int,
    total: Callable[[int], int],
    timeout_s: float,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[int, Offer]:
    """Offer this rank's parameters to one peer; called by all ranks of the source together.

    Args:
        host: where the other engine reaches rank 0.
        group: names the offer; no two share it.
        total: the sum of its argument over the ranks of the source.

    Returns:
        The port of the meeting place, and the offer, which ends by itself.

    Raises:
        WeightUpdateError: on every rank, where any of them cannot.
    """
    shard, store, port, reason = None, None, 0, "another rank of this engine cannot give its weights"
    try:
        shard = Shard(parameters)
        store = host_store(host, 0, timeout_s) if tp_rank == 0 else None
        port = total(store.port if store else 0)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        total(-UNABLE)
    if shard is None or port <= 0:
        raise WeightUpdateError(f"version {version} cannot be given at {host}: {reason}")
    offer = Offer(shard, Place(host, port, group, tp_rank), store, tp_size, version, timeout_s)
    offer.begin(bucket_bytes)
    return port, offer


def take(
    parameters: Mapping[str, torch.Tensor],
    address: str,
    group: str,
    version: int,
    *,
    tp_rank: int,
    all_agree: Callable[[bool], bool],
    timeout_s: float,
) -> None:
    """Take a version into the live parameters from the same rank of the engine that offers it at ``address``.

    Args:
        all_agree: true where the argument is true on every rank of this engine; called by all together.

    Raises:
        WeightUpdateError: on every rank of this engine, where any of them failed; the weights may then be
            partly new.
    """
    taker = _Taker(parameters, Place.at(address, group, tp_rank), version, timeout_s, all_agree)
    with contextlib.ExitStack() as stack:
        taker.together(lambda: taker.meet(stack))
        taker.together(taker.receive)
        with contextlib.suppress(WeightUpdateError):  # all have verified; whether the source hears is its own
            taker.tell(VERIFIED)


class _Taker:
    """One rank of the target."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        place: Place,
        version: int,
        timeout_s: float,
        all_agree: Callable[[bool], bool],
    ) -> None:
        self._parameters = parameters
        self._place, self._version = place, version
        self._timeout_s = timeout_s
        self._all_agree = all_agree
        self._is_heard = False  # whether the source waits for a word

    def together(self, action: Callable[[], None]) -> None:
        failure: Exception | None = None
        try:
            action()
        except (RuntimeError, ValueError) as error:
            failure = error
        if self._all_agree(failure is None):
            return
        with contextlib.suppress(WeightUpdateError):  # the failure is the error to report
            self.tell(FAILED)
        reason = str(failure).splitlines()[0] if failure is not None else "another rank of this engine failed"
        raise WeightUpdateError(f"taking version {self._version} from {self._place}: {reason}") from failure

    def tell(self, word: int) -> None:
        if self._is_heard:
            self._is_heard = False
            told = torch.tensor([word], dtype=torch.int64, device=self._shard.device)
            self._deadline.wait(start_send(self._group, SOURCE, told), "telling the source the result")

    def meet(self, stack: contextlib.ExitStack) -> None:
        """Join the source's rank, and compare what it has with what this rank holds."""
        self._shard = Shard(self._parameters)
        self._deadline = self._shard.deadline(self._timeout_s)
        store = reach(self._place, self._deadline)
        joining = pair_group(store, self._place, TARGET, self._deadline, self._shard.on_cuda)
        self._group = stack.enter_context(joining)
        manifest = json.loads(receive_message(self._group, SOURCE, self._deadline))
        self._is_heard = True
        if manifest["version"] != self._version:
            raise WeightUpdateError(f"it gives version {manifest['version']}")
        compare(manifest["parameters"], self._shard.described)
        self._buckets = self._shard.cut(manifest["bucket_bytes"])

    def receive(self) -> None:
        self.tell(VERIFIED)
        tensors, device = self._shard.tensors, self._shard.device
        digests = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        spaces = staging(2, max((num_bytes for num_bytes, _ in self._buckets), default=0), device)
        arriving: list[tuple[dist.Work, str]] = []
        for bucket_idx in range(len(self._buckets) + 1):
            if bucket_idx < len(self._buckets):
                space = spaces[bucket_idx % 2, : self._buckets[bucket_idx][0]]
                work = start_receive(self._group, SOURCE, space)
                arriving.append((work, f"waiting for bucket {bucket_idx} of the source"))
            if bucket_idx > 0:
                self._deadline.wait(*arriving[bucket_idx - 1])
                num_bytes, copies = self._buckets[bucket_idx - 1]
                copies.unpack(tensors, spaces[(bucket_idx - 1) % 2, :num_bytes], digests)
        self._verify(digests)

    def _verify(self, digests: torch.Tensor) -> None:
        sent = torch.zeros_like(digests)
        work = start_receive(self._group, SOURCE, sent)
        self._deadline.wait(work, "waiting for the digests of the source")
        self._is_heard = True
        wrong = (digests != sent).nonzero().flatten().tolist()
        if wrong:
            raise WeightUpdateError(
                f"{self._shard.names[wrong[0]]} did not arrive as it was sent"
                f" ({len(wrong)} of {len(self._shard.names)} digests differ)"
            )
