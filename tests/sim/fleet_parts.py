"""Engines, and what an observer sees of them, for the simulated publications (`tests.sim.fleet_world`)."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from asyncrl.control.messages import EngineStatus, Plan, PublicationResult, RunState
from asyncrl.engines.base import EngineError, PauseMode, StagePlace, WeightAction, WeightGroup
from asyncrl.engines.scripted import ScriptedEngine
from tests.sim.loop import SimLoop

NUM_RANKS = 2
MAX_LATENCY_S = 0.2
OWN, MIXED = -1, -2
METHODS = (
    *("pause", "resume", "join_weight_group", "leave_weight_group", "receive_weights", "stage_weights"),
    *("give_weights", "take_weights"),
)


@dataclass
class History:
    """What an outside observer saw; ``broken`` are rules that something broke at that moment."""

    broken: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)  # in the order in which it was seen
    results: list[tuple[PublicationResult, frozenset[str]]] = field(default_factory=list)
    """And the engines that served when the flight was prepared."""
    num_tokens: int = 0
    refusals: list[str] = field(default_factory=list)
    end: str = ""


def plan_of(name: str, incarnation: int) -> Plan:
    return Plan(plan_hash=f"plan of {name} {incarnation}", manifest_hash=f"manifest of {name} {incarnation}")


class SimEngine(ScriptedEngine):
    """One incarnation of an engine: slow, and as faulty as it is told to be."""

    def __init__(self, loop: SimLoop, history: History, name: str, incarnation: int) -> None:
        super().__init__(name, token_interval_s=loop.rng.choice([0.01, 0.1]))
        self._loop, self._history = loop, history
        self.incarnation = incarnation
        self.holds = OWN
        self.receiving = -1
        self.staging: asyncio.Task[None] | None = None
        self.group = ""
        self.arrived: set[tuple[str, int, int]] = set()  # (group, version, sender rank)
        self.corrupt = False
        self.hangs_in = ""
        self.paused_at = self.resumed_at = 0.0

    @property
    def alive(self) -> bool:
        return self._dead is None

    async def _enter(self, method: str) -> None:
        """A call takes a while, and may never come back."""
        await asyncio.sleep(self._loop.rng.random() * MAX_LATENCY_S)
        if self.hangs_in == method:
            self.hangs_in = ""
            await asyncio.sleep(10_000.0)
        self._check_alive()

    async def pause(self, mode: PauseMode) -> None:
        await self._enter("pause")
        await super().pause(mode)
        self.paused_at = self._loop.time()

    async def resume(self) -> None:
        await self._enter("resume")
        if self.holds < 0:
            self._history.broken.append(f"{self.name} resumes with {self.holds}")
        await super().resume()
        self.resumed_at = self._loop.time()

    async def join_weight_group(self, group: WeightGroup, timeout_s: float) -> None:
        await self._enter("join_weight_group")
        await super().join_weight_group(group, timeout_s)
        if len(self.weight_groups) > 1:
            self._history.broken.append(f"{self.name} is in the groups {sorted(self.weight_groups)}")

    async def leave_weight_group(self, group_name: str) -> None:
        await self._enter("leave_weight_group")
        self.weight_groups.discard(group_name)  # a broken group is gone even where leaving it fails
        await super().leave_weight_group(group_name)

    async def receive_weights(
        self, action: WeightAction, group_name: str, version: int, plan_hash: str, timeout_s: float
    ) -> None:
        await self._enter("receive_weights")
        if action == "connect":
            await super().receive_weights(action, group_name, version, plan_hash, timeout_s)
            return
        if not self._paused:
            self._history.broken.append(f"{self.name} receives while it samples")
        if plan_hash != plan_of(self.name, self.incarnation).plan_hash:
            raise self._error(f"follows another plan than {plan_hash}")
        self.holds = MIXED
        if action == "publish":
            await self._take_halves(group_name, version, timeout_s)
        await super().receive_weights(action, group_name, version, plan_hash, timeout_s)
        self.holds = version

    async def _take_halves(self, group_name: str, version: int, timeout_s: float) -> None:
        self.receiving, self.group, self.corrupt = version, group_name, False
        wanted = {(group_name, version, rank) for rank in range(NUM_RANKS)}
        try:
            async with asyncio.timeout(timeout_s):
                while not wanted <= self.arrived:
                    self._check_alive()
                    await self._changed.wait()
        except TimeoutError:
            raise self._error(f"waited {timeout_s:g} s for version {version}") from None
        finally:
            self.receiving = -1
        if self.corrupt:
            raise self._error("digests differ")

    async def stage_weights(
        self, place: StagePlace, group_name: str, version: int, plan_hash: str, timeout_s: float
    ) -> None:
        await self._enter("stage_weights")
        await super().stage_weights(place, group_name, version, plan_hash, timeout_s)
        if self.staging is not None and not self.staging.done():
            raise self._error(f"version {self.receiving} is still arriving")
        self._staged = -1
        self.staging = self._loop.create_task(self._stage(group_name, version, timeout_s))

    async def _stage(self, group_name: str, version: int, timeout_s: float) -> None:
        with contextlib.suppress(EngineError):
            await self._take_halves(group_name, version, timeout_s)
            self._staged = version

    async def give_weights(self, group_name: str, version: int, timeout_s: float) -> str:
        await self._enter("give_weights")
        await super().give_weights(group_name, version, timeout_s)
        return f"{self.name} {self.incarnation}"

    async def take_weights(self, group_name: str, address: str, version: int, timeout_s: float) -> None:
        await self._enter("take_weights")
        if not self._paused:
            self._history.broken.append(f"{self.name} is refilled while it samples")
        source = self.peers(address)
        if not isinstance(source, SimEngine) or source.given.get(group_name) != version:
            raise self._error(f"finds no offer of version {version} at {address}")
        self.holds, self.receiving, self.group, self.corrupt = MIXED, version, group_name, False
        self._history.faults.append("refill")
        try:
            for _ in range(NUM_RANKS):
                await asyncio.sleep(self._loop.rng.random())
                if not source.alive:
                    raise self._error(f"lost its source {source.name}")
        finally:
            self.receiving = -1
        if self.corrupt:
            raise self._error("digests differ")
        await super().take_weights(group_name, address, version, timeout_s)
        self.holds = source.holds

    def arrive(self, group: str, version: int, rank: int) -> None:
        """A sender's half is there."""
        self.arrived.add((group, version, rank))
        self._announce()

    async def _until_running(self, rid: str) -> None:
        await super()._until_running(rid)
        if self.alive and not self._aborted[rid]:
            self._history.num_tokens += 1
            if self.holds < 0 or self.holds != self._version:
                self._history.broken.append(f"{self.name} samples from {self.holds} and says {self._version}")


def look(history: History, engines: dict[tuple[str, int], SimEngine], state: RunState) -> None:
    """Rules about one moment: who serves holds what is committed, whole."""
    if not history.committed or history.committed[-1] != state.policy_version:
        history.committed.append(state.policy_version)
    for info in state.engines:
        if info.status is not EngineStatus.SERVING:
            continue
        if info.policy_version != state.policy_version:
            history.broken.append(
                f"{info.name} serves {info.policy_version}, {state.policy_version} is committed"
            )
        engine = engines[info.name, info.incarnation]
        if engine.alive and engine.holds != info.policy_version:
            history.broken.append(f"{info.name} holds {engine.holds}, is said to serve {info.policy_version}")


def check_result(
    history: History, engines: dict[str, SimEngine], result: PublicationResult, served: frozenset[str]
) -> None:
    """Rules about one publication: its pauses are those that the engines saw."""
    history.results.append((result, served))
    if set(result.paused_s) != served & set(result.committed):
        history.broken.append(f"pauses of {sorted(result.paused_s)}, {sorted(served)} served")
    for name, seconds in result.paused_s.items():
        engine = engines[name]
        seen = engine.resumed_at - engine.paused_at
        if seen < 0:  # it was put out since, and paused again
            continue
        if engine.alive and not seen <= seconds <= seen + 2 * MAX_LATENCY_S:
            history.broken.append(f"{name} was paused {seen:.2f} s, reported {seconds:.2f} s")


def violations(history: History, last_version: int) -> list[str]:
    """One line per rule that the whole history breaks."""
    broken = history.broken[:1]
    seen = [version for version in history.committed if version >= 0]
    if seen != list(range(len(seen))):
        broken.append(f"committed {seen}")
    if history.end == "done" and seen[-1:] != [last_version]:
        broken.append(f"done at {seen[-1:]}, not {last_version}")
    if any("\n" in refusal for refusal in history.refusals):
        broken.append("a refusal has several lines")
    return broken
