"""Trainer and engines meet: all ranks join a weight group with each engine that came, and leave those gone.

    all ranks:  leave engines that are gone, meet those that came: join, agree on a plan, link them
    rank 0:     tells the engine through the coordinator where to meet, and reports how it went

Every decision that rank 0 takes is broadcast before the ranks act on it, so all of them take part in the same
meetings in the same order. An engine that fails is met again before the next publication, or between two
steps. One that another engine has refilled meanwhile serves already, and goes on while it is met.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from asyncrl.config import Config
from asyncrl.control.client import ControlClient, ControlError, ControlRefused
from asyncrl.control.messages import EngineInfo, EngineStatus, Joined, JoinOrder, Plan, RunState
from asyncrl.engines.base import WeightGroup
from asyncrl.trainer.collectives import broadcast_json
from asyncrl.trainer.links import Linking
from asyncrl.weights.publisher import EngineEndpoint, Publisher
from asyncrl.weights.wire import WeightUpdateError


@dataclass(frozen=True)
class Met:
    """An engine of which this rank is in a weight group."""

    endpoint: EngineEndpoint
    incarnation: int


class Meetings:
    """All ranks construct it together and call its methods together, `has_news` and `changes` apart."""

    def __init__(self, publisher: Publisher, control: ControlClient | None, config: Config) -> None:
        self._publisher = publisher
        self._control = control  # on rank 0 only
        self._config = config
        self._num_meetings = 0
        self.links = Linking(publisher, control, config)
        self.met: dict[str, Met] = {}

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
        self._link()

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
        return any(_waits_for_trainer(engine) for engine in state.engines)

    def follow(self) -> None:
        """Leave engines that are gone, meet those that came or must be refilled."""
        change = broadcast_json(self.changes(self._control.state()) if self._control else None)
        for name in change["leave"]:
            self.leave(name)
        for item in change["meet"]:
            self._meet(EngineInfo.model_validate(item))
        self._link()

    def _link(self) -> None:
        self.links.link(
            {name: met.incarnation for name, met in self.met.items()},
            {name: met.endpoint.tp_size for name, met in self.met.items()},
        )

    def changes(self, state: RunState) -> dict[str, Any]:
        known = {engine.name: engine for engine in state.engines}
        leave = [
            name
            for name, met in self.met.items()
            if known[name].incarnation != met.incarnation or not known[name].joined
        ]
        kept = self.met.keys() - set(leave)
        meet = [engine for engine in state.engines if _waits_for_trainer(engine) and engine.name not in kept]
        return {"leave": leave, "meet": [engine.model_dump() for engine in meet]}

    def leave(self, name: str) -> None:
        self._publisher.disconnect(name)
        self.met.pop(name, None)

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
                    self.met[engine.name] = Met(endpoint, engine.incarnation)
                except WeightUpdateError as error:  # on every rank alike
                    reason = str(error)
                reason = broadcast_json(self._report(engine.name, reason) if self._control else None)
        if reason:
            self.leave(engine.name)
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
        plan = None if failure else self.plan(name)
        joined = Joined(engine=name, plan=plan, failure=failure)
        reason: str = self._require_control().post("weights/joined", joined, timeout_s=self._deadline_s)
        return reason

    def plan(self, name: str) -> Plan:
        return Plan(
            plan_hash=self._publisher.plan_hash(name), manifest_hash=self._publisher.manifest_hash(name)
        )

    @property
    def _deadline_s(self) -> float:
        """Longer than the coordinator's own deadlines, whose messages say more."""
        return control_deadline_s(self._config)

    def _require_control(self) -> ControlClient:
        assert self._control is not None, "only rank 0 talks to the coordinator"
        return self._control


def control_deadline_s(config: Config) -> float:
    """For a step of a publication: longer than the coordinator's own deadlines, whose messages say more."""
    return 3 * config.weights.timeout_s + 30.0


def _waits_for_trainer(engine: EngineInfo) -> bool:
    """One that is being refilled, which is PREPARED and has not joined, can be met when it serves."""
    if engine.status is EngineStatus.JOINING:
        return True
    return not engine.joined and engine.status in (EngineStatus.QUARANTINED, EngineStatus.SERVING)


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
