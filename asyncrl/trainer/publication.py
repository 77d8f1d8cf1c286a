"""The trainer's side of publishing a policy version: rank 0 talks to the coordinator, all ranks send.

    all ranks:  leave engines that are gone, meet those that came: join, agree on a plan
    rank 0:     prepare -> (engines pause) -> transfer -> (engines listen) ................ -> commit
    all ranks:                                  plan and hash known since the meeting, send buckets

Every decision that rank 0 takes is broadcast before the ranks act on it, so all of them take part in the
same meetings and transfers in the same order. An engine that fails is met again before the next publication,
or between two steps, and gets the whole current version alone; the run goes on while one engine serves.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from asyncrl.config import Config
from asyncrl.control.client import ControlClient, ControlError, ControlRefused
from asyncrl.control.messages import (
    CommitOrder,
    EngineInfo,
    EngineStatus,
    FlightName,
    Joined,
    JoinOrder,
    Plan,
    Publication,
    PublicationResult,
    RunState,
)
from asyncrl.engines.base import WeightGroup
from asyncrl.trainer.collectives import broadcast_json
from asyncrl.types import PolicyVersion
from asyncrl.weights.publisher import EngineEndpoint, Publisher
from asyncrl.weights.wire import WeightUpdateError

MAX_LOOKS = 20
"""How often the engines may change between the look at them and the order that follows from it."""


@dataclass(frozen=True)
class PublishTimes:
    """Seconds, as rank 0 saw them."""

    total_s: float
    transfer_s: float
    num_bytes: int  # that arrived at all engines
    paused_s: Mapping[str, float] = field(default_factory=dict)  # engine -> how long it answered nobody

    @property
    def engine_paused_s(self) -> float:
        """The longest pause of any engine."""
        return max(self.paused_s.values(), default=0.0)


@dataclass(frozen=True)
class _Met:
    """An engine of which this rank is in a weight group."""

    endpoint: EngineEndpoint
    incarnation: int


class PolicyPublisher:
    """All ranks construct it together and call its methods together, `has_news` apart."""

    def __init__(self, publisher: Publisher, control: ControlClient | None, config: Config) -> None:
        self._publisher = publisher
        self._control = control  # on rank 0 only
        self._config = config
        self._met: dict[str, _Met] = {}
        self._num_meetings = 0
        self.last_result: PublicationResult | None = None  # on rank 0 only

    # --- engines come and go ---

    def connect_engines(self) -> None:
        """Wait until all configured engines are up, and join a weight group with each.

        Raises:
            ControlError: an engine did not come up or did not join within its deadline.
        """
        waited = [engine.model_dump() for engine in self._wait_for_engines()] if self._control else None
        for engine in (EngineInfo.model_validate(item) for item in broadcast_json(waited)):
            reason = self._meet(engine)
            if reason:
                raise ControlError(f"{engine.name} cannot take the trainer's weights: {reason}")

    def _wait_for_engines(self) -> list[EngineInfo]:
        control = self._require_control()
        expected = self._config.engine.replicas
        deadline = time.monotonic() + self._config.engine.start_timeout_s
        state = control.state()
        while len(state.engines) < expected:
            if time.monotonic() > deadline:
                raise ControlError(
                    f"{len(state.engines)} of {expected} engines came up within"
                    f" {self._config.engine.start_timeout_s:.0f} s; see the engines' logs"
                )
            state = control.state(after=state.revision, wait_s=2.0)
        return list(state.engines)

    def has_news(self, state: RunState) -> bool:
        """Whether an engine waits to be met, or for the current version; on rank 0."""
        return any(engine.status in _WAITING for engine in state.engines)

    def _follow_engines(self) -> None:
        """Leave engines that are gone, meet those that came or must be refilled."""
        change = broadcast_json(self._changes(self._control.state()) if self._control else None)
        for name in change["leave"]:
            self._leave(name)
        for item in change["meet"]:
            self._meet(EngineInfo.model_validate(item))

    def _changes(self, state: RunState) -> dict[str, Any]:
        known = {engine.name: engine for engine in state.engines}
        leave = [
            name
            for name, met in self._met.items()
            if known[name].incarnation != met.incarnation or known[name].status in _OUT
        ]
        kept = self._met.keys() - set(leave)
        meet = [engine for engine in state.engines if engine.status in _WAITING and engine.name not in kept]
        return {"leave": leave, "meet": [engine.model_dump() for engine in meet]}

    def _leave(self, name: str) -> None:
        self._publisher.disconnect(name)
        self._met.pop(name, None)

    def _meet(self, engine: EngineInfo) -> str:
        """Join a weight group with an engine; returns why that failed, or an empty string."""
        self._num_meetings += 1
        with _reserved_port(self._config.control.host if self._control else None) as port:
            offer = broadcast_json(self._offer(engine, port) if self._control else None)
            reason: str = offer["refused"]
            if not reason:
                endpoint = EngineEndpoint(**offer["endpoint"])
                try:
                    self._publisher.connect(endpoint)
                    self._met[engine.name] = _Met(endpoint, engine.incarnation)
                except WeightUpdateError as error:  # on every rank alike
                    reason = str(error)
                reason = broadcast_json(self._report(engine.name, reason) if self._control else None)
        if reason:
            self._leave(engine.name)
        return reason

    def _offer(self, engine: EngineInfo, port: int) -> dict[str, Any]:
        """Tell the engine where to meet, and the other ranks, too."""
        group = WeightGroup(
            name=f"weights-{engine.name}-{self._num_meetings}",
            master_address=self._config.control.host,
            master_port=port,
            rank_offset=dist.get_world_size(),
            world_size=dist.get_world_size() + engine.tp,
            backend="nccl" if dist.get_backend() == "nccl" else "gloo",
        )
        try:
            self._require_control().post("weights/join", JoinOrder(engine=engine.name, group=group))
        except ControlRefused as error:  # it was lost since
            return {"refused": str(error)}
        endpoint = {
            "name": engine.name,
            "tp_size": engine.tp,
            "group_name": group.name,
            "master_address": group.master_address,
            "master_port": group.master_port,
        }
        return {"refused": "", "endpoint": endpoint}

    def _report(self, name: str, failure: str) -> str:
        plan = None if failure else self._plan(name)
        joined = Joined(engine=name, plan=plan, failure=failure)
        reason: str = self._require_control().post("weights/joined", joined, timeout_s=self._deadline_s)
        return reason

    def _plan(self, name: str) -> Plan:
        return Plan(
            plan_hash=self._publisher.plan_hash(name), manifest_hash=self._publisher.manifest_hash(name)
        )

    # --- versions ---

    def publish(self, version: PolicyVersion) -> PublishTimes:
        """Bring the current weights into every engine as ``version``.

        Raises:
            ControlError: no engine holds the version in the end.
        """
        started = time.monotonic()
        times = self._bring(version, alone=False)
        assert times is not None, "the coordinator refuses a publication without engines"
        return PublishTimes(time.monotonic() - started, times.transfer_s, times.num_bytes, times.paused_s)

    def catch_up(self, version: PolicyVersion) -> None:
        """Bring the current weights, published as ``version`` before, into engines that came since.

        An engine that cannot take them is the coordinator's to judge; training goes on.
        """
        self._bring(version, alone=True)

    def _bring(self, version: PolicyVersion, alone: bool) -> PublishTimes | None:
        """One flight; None where there was nobody to bring the version to."""
        started = time.monotonic()
        flight = self._prepare_together(version, alone)
        if not flight["plans"]:
            return None
        endpoints = [self._met[name].endpoint for name in flight["ready"]]
        sending = time.monotonic()
        stats = self._publisher.publish(endpoints, version)
        sent = time.monotonic()
        failures = {failure.engine: failure.reason for failure in stats.failures}  # left already
        outcome = broadcast_json(self._commit(flight, failures, alone) if self._control else None)
        if outcome is None:
            return None
        result = PublicationResult.model_validate(outcome)
        if not alone:
            self.last_result = result
        return PublishTimes(
            time.monotonic() - started, sent - sending, stats.bytes_received_total, result.paused_s
        )

    def _prepare_together(self, version: PolicyVersion, alone: bool) -> dict[str, Any]:
        """Version, epoch, engines of the flight and those that are ready, once the coordinator agrees.

        Raises:
            ControlError: it refuses for another reason than a change of the engines.
        """
        for _ in range(MAX_LOOKS):
            self._follow_engines()
            flight: dict[str, Any] = broadcast_json(self._prepare(version, alone) if self._control else None)
            if not flight["again"]:
                return flight
        raise ControlError(f"the engines changed {MAX_LOOKS} times while version {version} was prepared")

    def _prepare(self, version: PolicyVersion, alone: bool) -> dict[str, Any]:
        control = self._require_control()
        state = control.state()
        changes = self._changes(state)
        names = self._met.keys() - set(changes["leave"])
        if alone:
            names &= {engine.name for engine in state.engines if engine.status is EngineStatus.JOINING}
        flight = {"again": False, "version": version, "epoch": state.epoch, "plans": sorted(names)}
        if not names and (alone or changes["meet"]):
            return {**flight, "again": not alone}
        plans = {name: self._plan(name) for name in sorted(names)}
        order = Publication(version=version, epoch=state.epoch, plans=plans)
        try:
            ready = control.post("weights/prepare", order, timeout_s=self._deadline_s)
        except ControlRefused:
            if control.state().epoch == state.epoch:
                raise
            return {"again": True}
        control.post("weights/transfer", FlightName(version=version, epoch=state.epoch))
        return {**flight, "ready": ready}

    def _commit(
        self, flight: Mapping[str, Any], failures: dict[str, str], alone: bool
    ) -> dict[str, Any] | None:
        order = CommitOrder(version=flight["version"], epoch=flight["epoch"], failures=failures)
        try:
            answer = self._require_control().post("weights/commit", order, timeout_s=self._deadline_s)
        except ControlError:
            if not alone:
                raise
            return None  # no engine took it; those that served before go on
        return PublicationResult.model_validate(answer).model_dump()

    @property
    def _deadline_s(self) -> float:
        """Longer than the coordinator's own deadlines, whose messages say more."""
        return 3 * self._config.weights.timeout_s + 30.0

    def _require_control(self) -> ControlClient:
        assert self._control is not None, "only rank 0 talks to the coordinator"
        return self._control


_WAITING = (EngineStatus.JOINING, EngineStatus.QUARANTINED)
_OUT = (EngineStatus.QUARANTINED, EngineStatus.LOST)


@contextlib.contextmanager
def _reserved_port(host: str | None) -> Iterator[int]:
    """A port that nobody else is given within the block, though a store that listens may take it."""
    if host is None:
        yield 0
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))
        yield probe.getsockname()[1]
