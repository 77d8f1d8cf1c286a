"""The trainer's side of a publication, the same on every trainer rank.

    construct: the layouts of all trainer ranks are exchanged once
    connect:   `handshake` with one engine ends in a plan; this rank's part of it becomes a `BucketSender`
    begin:     every rank sends its buckets to each engine, one thread per engine, from its parameters or from
               a copy of them, so that they may change meanwhile. With ``delta`` every rank keeps what it
               published last, and an engine that holds just that is told the changes since
    finish:    the outcome is exchanged

All ranks call each method together and with the same arguments. An engine fails alone: its failure is part of
the result on every rank, its group is left, and the other engines go on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from asyncrl.weights.collective import exchange_layouts, gather_messages
from asyncrl.weights.geometry import ModelError, ModelGeometry
from asyncrl.weights.handshake import Handshake, Meeting
from asyncrl.weights.layout import ShardLayout
from asyncrl.weights.plan import TransferPlan
from asyncrl.weights.transport import BucketSender, EngineEndpoint, Version
from asyncrl.weights.wire import NO_BASE, WeightUpdateError

__all__ = ["EngineEndpoint", "EngineFailure", "PublishStats", "Publisher"]


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
class _Outcome:
    """Of one rank's sending to one engine."""

    num_bytes: int
    reason: str  # why it failed, or an empty string
    seconds: float  # until its last bucket had left


class Sending:
    """One version on its way, on threads of its own; `Publisher.finish` ends it."""

    def __init__(
        self,
        version: Version,
        connections: Mapping[str, _Connection],
        base: Version | None,
        timeout_s: float,
        staged: bool,
    ) -> None:
        self.version = version
        self.connections = dict(connections)
        self._began = time.monotonic()
        self._staged = staged
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(connections)))
        self._outcomes: dict[str, Future[_Outcome]] = {
            name: self._pool.submit(self._send, connection, base) for name, connection in connections.items()
        }

    def _send(self, connection: _Connection, base: Version | None) -> _Outcome:
        holds_base = base is not None and base.version == connection.held
        num_bytes, reason = 0, ""
        try:
            num_bytes = connection.sender.send(
                self.version, self._timeout_s, base if holds_base else None, staged=self._staged
            )
        except WeightUpdateError as error:
            reason = str(error)
        return _Outcome(num_bytes, reason, time.monotonic() - self._began)

    def wait(self) -> list[_Outcome]:
        """This rank's outcomes, by engine in the order of ``connections``; every send has a deadline."""
        outcomes = [future.result() for future in self._outcomes.values()]
        self._pool.shutdown()
        return outcomes

    def failures_here(self) -> dict[str, str]:
        """The engines to which this rank could not send, and why, once it has sent to the others."""
        pairs = zip(self.connections, self.wait(), strict=True)
        return {name: outcome.reason for name, outcome in pairs if outcome.reason}


class Publisher:
    """Sends this trainer rank's shards to engines.

    Args:
        layouts, tensors: the rank's parameters over all its model chunks; contiguous float32 or bfloat16.
        bucket_bytes: largest message; two of them are staged per engine, three with ``delta``.
        timeout_s: deadline of joining a group, and of one publication to one engine.
        delta: keep a copy of the parameters of the last version, and send what changed since. A version that
            is sent from a copy needs room for one more meanwhile.

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
        for connection in self._connections.values():
            loads = [sum(pair) for pair in zip(loads, connection.plan.sent_bytes(), strict=True)]
        meeting = self._handshake.meet(endpoint, loads)
        sender = BucketSender(meeting.plan, self._handshake.rank, meeting.group, self._tensors)
        self._connections[endpoint.name] = _Connection(meeting, sender)

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
    ) -> Sending:
        """Begin to send one version to connected engines; one at a time.

        Args:
            staged: the engines receive it beside what they serve.
            from_copy: copy the parameters first, so that they may change at once.
        """
        sent = self._copied(version) if from_copy else Version(version, self._tensors)
        connections = {endpoint.name: self._connections[endpoint.name] for endpoint in endpoints}
        return Sending(sent, connections, self._last, self._handshake.timeout_s, staged)

    def finish(self, sending: Sending, taken_by: Collection[str] | None = None) -> PublishStats:
        """Wait until every rank has sent; engines that fail are in the result and no longer connected.

        Args:
            taken_by: the engines that serve the version; default: all that did not fail.
        """
        outcomes = sending.wait()
        everybody = _exchange(outcomes)
        failures = _failures(list(sending.connections), everybody)
        for failure in failures:
            self.disconnect(failure.engine)
        version = sending.version.version
        for name in sending.connections.keys() & self._connections.keys():
            sending.connections[name].held = version if taken_by is None or name in taken_by else NO_BASE
        self._keep(sending.version)
        return PublishStats(
            seconds=max((outcome.seconds for outcome in outcomes), default=0.0),
            bytes_sent=sum(outcome.num_bytes for outcome in outcomes),
            bytes_received_total=sum(
                outcome.num_bytes
                for name, of_engine in zip(sending.connections, zip(*everybody, strict=True), strict=True)
                if name in self._connections
                for outcome in of_engine
            ),
            num_buckets=sum(item.sender.num_buckets for item in sending.connections.values()),
            failures=tuple(failures),
        )

    def _keep(self, sent: Version) -> None:
        """With ``delta``, remember what was sent: an engine that takes it holds just these parameters."""
        is_copy = sent.parameters is not self._tensors
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
        if connection is not None:
            dist.destroy_process_group(connection.meeting.group)


def _exchange(own: Sequence[_Outcome]) -> list[list[_Outcome]]:
    """Per trainer rank, per engine."""
    told = json.dumps([[outcome.num_bytes, outcome.reason, outcome.seconds] for outcome in own]).encode()
    return [[_Outcome(*item) for item in json.loads(message)] for message in gather_messages(told)]


def _failures(engines: Sequence[str], everybody: Sequence[Sequence[_Outcome]]) -> list[EngineFailure]:
    """For every engine that failed on any trainer rank, the first such rank's reason."""
    failures = []
    for engine, outcomes in zip(engines, zip(*everybody, strict=True), strict=True):
        told = [f"trainer rank {rank}: {item.reason}" for rank, item in enumerate(outcomes) if item.reason]
        if told:
            failures.append(EngineFailure(engine, told[0]))
    return failures


def _usable(tensor: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    if tuple(tensor.shape) != layout.shape or not tensor.is_contiguous():
        raise ModelError(
            f"{layout.name}: a contiguous tensor of shape {layout.shape} is needed, not {tuple(tensor.shape)}"
            f" with strides {tensor.stride()}"
        )
    return tensor.detach()
