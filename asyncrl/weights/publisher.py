"""The trainer's side of a publication, the same on every trainer rank.

    construct: the layouts of all trainer ranks are exchanged once
    connect:   `handshake` with one engine ends in a plan; this rank's part of it becomes a `BucketSender`
    publish:   every rank sends its buckets to each engine, one thread per engine; the outcome is exchanged.
               With ``delta`` every rank keeps what it published last, and an engine that verified just that
               is told the changes since; every other engine gets everything

All ranks call each method together and with the same arguments. An engine fails alone: its failure is part of
the result on every rank, its group is left, and the other engines go on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from asyncrl.weights.collective import exchange_layouts, gather_messages
from asyncrl.weights.geometry import ModelError, ModelGeometry
from asyncrl.weights.handshake import Handshake, Meeting
from asyncrl.weights.layout import ShardLayout
from asyncrl.weights.plan import TransferPlan
from asyncrl.weights.transport import Base, BucketSender, EngineEndpoint
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

    seconds: float
    bytes_sent: int  # by this rank
    bytes_received_total: int  # by all ranks of all engines that did not fail; fewer than held with ``delta``
    num_buckets: int  # sent by this rank
    failures: tuple[EngineFailure, ...]


@dataclass(slots=True)
class _Connection:
    meeting: Meeting
    sender: BucketSender
    held: int = NO_BASE  # the version that the engine verified last

    @property
    def plan(self) -> TransferPlan:
        return self.meeting.plan


class Publisher:
    """Sends this trainer rank's shards to engines.

    Args:
        layouts, tensors: the rank's parameters over all its model chunks; contiguous float32 or bfloat16.
        bucket_bytes: largest message; two of them are staged per engine, three with ``delta``.
        timeout_s: deadline of joining a group, and of one publication to one engine.
        delta: keep a copy of the parameters of the last version, and send what changed since.

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
        self._last: Base | None = None

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
        started = time.monotonic()
        connections = {endpoint.name: self._connections[endpoint.name] for endpoint in endpoints}
        with ThreadPoolExecutor(max_workers=max(1, len(connections))) as pool:
            outcomes = list(pool.map(lambda item: self._send(item, version), connections.values()))
        everybody = _exchange(outcomes)
        failures = _failures(list(connections), everybody)
        for failure in failures:
            self.disconnect(failure.engine)
        for name in connections.keys() & self._connections.keys():
            connections[name].held = version
        if self._delta:
            self._keep(version)
        return PublishStats(
            seconds=time.monotonic() - started,
            bytes_sent=sum(outcome.num_bytes for outcome in outcomes),
            bytes_received_total=sum(
                outcome.num_bytes
                for name, of_engine in zip(connections, zip(*everybody, strict=True), strict=True)
                if name in self._connections
                for outcome in of_engine
            ),
            num_buckets=sum(item.sender.num_buckets for item in connections.values()),
            failures=tuple(failures),
        )

    def _keep(self, version: int) -> None:
        """Remember the parameters as ``version``; any engine that holds it was sent just these."""
        kept = self._last.parameters if self._last else [torch.empty_like(tensor) for tensor in self._tensors]
        for copy, tensor in zip(kept, self._tensors, strict=True):
            copy.copy_(tensor)
        self._last = Base(version, kept)

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

    def _send(self, connection: _Connection, version: int) -> _Outcome:
        base = self._last if self._last and self._last.version == connection.held else None
        try:
            return _Outcome(connection.sender.send(version, self._handshake.timeout_s, base), "")
        except WeightUpdateError as error:
            return _Outcome(0, str(error))


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Of one rank's sending to one engine."""

    num_bytes: int
    reason: str  # why it failed, or an empty string


def _exchange(own: Sequence[_Outcome]) -> list[list[_Outcome]]:
    """Per trainer rank, per engine."""
    told = json.dumps([[outcome.num_bytes, outcome.reason] for outcome in own]).encode()
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
