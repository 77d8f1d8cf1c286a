"""The trainer's side of a publication, the same on every trainer rank.

    construct: the layouts of all trainer ranks are exchanged once
    connect:   `handshake` with one engine ends in a plan; this rank's part of it becomes a `BucketSender`
    link:      engines of one plan pass buckets on to each other, so that each leaves the trainer once
    begin:     every rank sends its buckets to each engine, or to each link, one thread for each, from its
               parameters or from a copy of them, so that they may change meanwhile. With ``delta`` every rank
               keeps what it published last, and an engine that holds just that is told the changes since
    finish:    the outcome is exchanged

All ranks call each method together and with the same arguments. An engine fails alone: its failure is part of
the result on every rank, its group is left, and the other engines go on. Linked engines fail together, and
are sent to one by one until they are linked again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from asyncrl.weights.collective import exchange_layouts
from asyncrl.weights.cost import Strategy
from asyncrl.weights.delivery import Target
from asyncrl.weights.geometry import ModelError, ModelGeometry
from asyncrl.weights.handshake import Handshake, Meeting
from asyncrl.weights.layout import ShardLayout
from asyncrl.weights.plan import TransferPlan
from asyncrl.weights.routes import Linked
from asyncrl.weights.sending import Parcel, Sending, exchange_outcomes, failures_anywhere
from asyncrl.weights.transport import BucketSender, EngineEndpoint, LinkedBy, Version
from asyncrl.weights.wire import NO_BASE, WeightUpdateError

__all__ = ["EngineEndpoint", "EngineFailure", "PublishStats", "Publisher", "Sending", "Strategy"]


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """Why one engine did not get the version."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class PublishStats:
    """What one publication moved; ``failures`` is the same on every rank."""

    seconds: float  # until this rank's last bucket had left
    bytes_sent: int  # by this rank
    bytes_received_total: int  # by all ranks of all engines that did not fail; fewer than held with ``delta``
    num_buckets: int  # sent by this rank
    failures: tuple[EngineFailure, ...]


@dataclass(slots=True)
class _Connection:
    meeting: Meeting
    sender: BucketSender
    held: int = NO_BASE  # the version that the engine took last

    @property
    def plan(self) -> TransferPlan:
        return self.meeting.plan


@dataclass(frozen=True, slots=True)
class _Linked:
    engines: tuple[str, ...]
    sender: BucketSender


class Publisher:
    """Sends this trainer rank's shards to engines.

    Args:
        layouts, tensors: the rank's parameters over all its model chunks; contiguous float32 or bfloat16.
        bucket_bytes: largest message; two of them are staged per engine, three with ``delta``.
        timeout_s: deadline of joining a group, and of one publication to one engine.
        delta: keep a copy of the parameters of the last version, and send what changed since. A version that
            is sent from a copy needs room for one more meanwhile.
        choose: the strategy for the first engine's plan, taken to be that of all.

    Raises:
        ModelError: a tensor does not fit its layout.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        layouts: Sequence[ShardLayout],
        tensors: Mapping[str, torch.Tensor],
        geometry: ModelGeometry,
        bucket_bytes: int,
        timeout_s: float,
        delta: bool = False,
        choose: Callable[[TransferPlan], Strategy] = lambda _: "p2p",
    ) -> None:
        if dist.get_world_size() != world_size or dist.get_rank() != rank:
            raise ModelError(
                f"rank {rank} of {world_size} is rank {dist.get_rank()} of {dist.get_world_size()} in the job"
            )
        self._tensors = [_usable(tensors[layout.name], layout) for layout in layouts]
        senders = exchange_layouts(layouts, self._tensors)
        self._handshake = Handshake(rank, senders, geometry, bucket_bytes, timeout_s)
        self._connections: dict[str, _Connection] = {}
        self._delta = delta
        self._choose = choose
        self._strategy: Strategy = "p2p"
        self._linked: _Linked | None = None
        self._last: Version | None = None  # what was published last
        self._spare: Sequence[torch.Tensor] | None = None  # room for a copy

    def connect(self, endpoint: EngineEndpoint) -> None:
        """Meet an engine whose ranks are joining the same group, and agree on a plan.

        Raises:
            WeightUpdateError: on every rank: a member did not come, or the engine serves another model.
        """
        if endpoint.name in self._connections:
            raise WeightUpdateError(f"engine {endpoint.name} is connected already; disconnect it first")
        loads = [0] * len(self._handshake.senders)
        if self._strategy == "p2p":  # else engines have one plan
            for connection in self._connections.values():
                loads = [sum(pair) for pair in zip(loads, connection.plan.sent_bytes(), strict=True)]
        meeting = self._handshake.meet(endpoint, loads)
        if not self._connections:
            self._strategy = self._choose(meeting.plan)
        target = Target(endpoint.name, meeting.group)
        sender = BucketSender(meeting.plan, self._handshake.rank, [target], self._tensors)
        self._connections[endpoint.name] = _Connection(meeting, sender)

    @property
    def strategy(self) -> Strategy:
        """How engines of one plan are to be sent to; known once one is connected."""
        return self._strategy

    def linkable(self) -> tuple[str, ...]:
        """The engines that a link would help: the most of one plan, by name, where there are several."""
        by_plan: dict[str, list[str]] = {}
        for name in sorted(self._connections):
            by_plan.setdefault(self._connections[name].plan.plan_hash, []).append(name)
        most = max(by_plan.values(), key=len, default=[])
        return tuple(most) if len(most) > 1 and self._strategy != "p2p" else ()

    def link(self, engines: Sequence[str], number: int, strategy: Linked) -> None:
        """Send to these engines together from now on; their ranks have joined link ``number``, as its
        replicas in this order."""
        targets = [Target(name, self._connections[name].meeting.group) for name in engines]
        plan, linked_by = self._connections[engines[0]].plan, LinkedBy(number, strategy)
        sender = BucketSender(plan, self._handshake.rank, targets, self._tensors, linked_by)
        self._linked = _Linked(tuple(engines), sender)

    def unlink(self) -> None:
        """Send to every engine by itself from now on."""
        self._linked = None

    @property
    def linked(self) -> tuple[str, ...]:
        """The engines that pass buckets on to each other."""
        return self._linked.engines if self._linked else ()

    def publish(self, endpoints: Sequence[EngineEndpoint], version: int) -> PublishStats:
        """Send one version to connected engines; the parameters must not change meanwhile.

        Engines that fail are in the result and no longer connected.
        """
        return self.finish(self.begin(endpoints, version))

    def begin(
        self,
        endpoints: Sequence[EngineEndpoint],
        version: int,
        *,
        staged: bool = False,
        from_copy: bool = False,
        again: Sending | None = None,
    ) -> Sending:
        """Begin to send one version to connected engines; one at a time.

        Args:
            staged: the engines receive it beside what they serve.
            from_copy: copy the parameters first, so that they may change at once.
            again: the sending that was finished last, whose parameters are to be sent again.
        """
        if again is not None:
            sent, self._spare = again.version, None
        else:
            sent = self._copied(version) if from_copy else Version(version, self._tensors)
        names = [endpoint.name for endpoint in endpoints]
        return Sending(sent, self._parcels(names), self._handshake.timeout_s, staged)

    def _parcels(self, names: Sequence[str]) -> list[Parcel]:
        """Who is sent to together: those that are linked, where all of them are to be sent to."""
        linked = self._linked if self._linked and set(self._linked.engines) <= set(names) else None
        together = linked.engines if linked else ()
        parcels = [Parcel(linked.engines, linked.sender, self._base(linked.engines))] if linked else []
        return parcels + [
            Parcel((name,), self._connections[name].sender, self._base((name,)))
            for name in names
            if name not in together
        ]

    def _base(self, engines: Sequence[str]) -> Version | None:
        """What is kept of the version that all of these engines hold."""
        last = self._last
        holds = last is not None and all(self._connections[e].held == last.version for e in engines)
        return last if holds else None

    def finish(self, sending: Sending, taken_by: Collection[str] | None = None) -> PublishStats:
        """Wait until every rank has sent; engines that fail are in the result and no longer connected.

        Args:
            taken_by: the engines that serve the version; default: all that did not fail.
        """
        outcomes = sending.wait()
        everybody = exchange_outcomes(outcomes)
        failures = failures_anywhere(everybody)
        for engine in failures:
            self.disconnect(engine)
        version, received = sending.version.version, 0
        for parcel, of_ranks in zip(sending.parcels, zip(*everybody, strict=True), strict=True):
            for name in set(parcel.engines) & self._connections.keys():
                received += sum(outcome.num_bytes for outcome in of_ranks)
                took = taken_by is None or name in taken_by
                self._connections[name].held = version if took else NO_BASE
        self._keep(sending.version)
        return PublishStats(
            seconds=max((outcome.seconds for outcome in outcomes), default=0.0),
            bytes_sent=sum(outcome.num_bytes for outcome in outcomes),
            bytes_received_total=received,
            num_buckets=sum(parcel.sender.num_buckets for parcel in sending.parcels),
            failures=tuple(EngineFailure(engine, reason) for engine, reason in failures.items()),
        )

    def _keep(self, sent: Version) -> None:
        """With ``delta``, remember what was sent: an engine that takes it holds just these parameters."""
        is_copy = sent.parameters is not self._tensors
        if sent is self._last:  # sent again
            return
        if not self._delta:
            self._spare = sent.parameters if is_copy else None
            return
        before, self._last = self._last, None
        self._spare = before.parameters if before else None
        self._last = sent if is_copy else self._copied(sent.version)

    def _copied(self, version: int) -> Version:
        """The parameters as they are now, in the room of an earlier copy where there is one."""
        room = self._spare or [torch.empty_like(tensor) for tensor in self._tensors]
        self._spare = None
        for copy, tensor in zip(room, self._tensors, strict=True):
            copy.copy_(tensor)
        return Version(version, room)

    def plan_hash(self, engine: str) -> str:
        """Of a connected engine; the engine is told it with every version."""
        return self._connections[engine].plan.plan_hash

    def manifest_hash(self, engine: str) -> str:
        """Of what a connected engine said that it holds."""
        return self._connections[engine].meeting.manifest_hash

    def is_connected(self, engine: str) -> bool:
        return engine in self._connections

    def disconnect(self, engine: str) -> None:
        """Leave an engine's group; does nothing for an engine that failed and was left before."""
        connection = self._connections.pop(engine, None)
        if engine in self.linked:
            self.unlink()
        if connection is not None:
            dist.destroy_process_group(connection.meeting.group)


def _usable(tensor: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    if tuple(tensor.shape) != layout.shape or not tensor.is_contiguous():
        raise ModelError(
            f"{layout.name}: a contiguous tensor of shape {layout.shape} is needed, not {tuple(tensor.shape)}"
            f" with strides {tensor.stride()}"
        )
    return tensor.detach()
