"""Publications and refills through the real coordinator: a trainer of two ranks, engines that die, requests.

Everything around the coordinator is a model a few lines long; faults strike at any await. What happens is
judged by `tests.sim.fleet_parts`, which shares no code with the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from asyncrl.control.coordinator import Coordinator
from asyncrl.control.ledger import LedgerCounts
from asyncrl.control.messages import (
    CommitOrder,
    EngineFailed,
    EngineInfo,
    EngineLost,
    EngineStatus,
    FlightName,
    Joined,
    JoinOrder,
    Landing,
    Publication,
    PublicationResult,
    RolloutReport,
    StageOrder,
)
from asyncrl.control.protocol import Refused
from asyncrl.engines.base import EngineError, GenerateRequest, WeightGroup, new_rid
from tests.sim.fleet_parts import (
    METHODS,
    NUM_RANKS,
    History,
    SimEngine,
    check_result,
    look,
    plan_of,
    violations,
)
from tests.sim.loop import SimLoop

TIMEOUT_S = 10.0
VIRTUAL_LIMIT_S = 1000.0
WAITING = (EngineStatus.JOINING, EngineStatus.QUARANTINED)


class TrainerDied(RuntimeError):
    """A request or its answer was lost, or a rank was killed: the run is over."""


class FleetWorld:
    """One simulated run."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop, self.rng = loop, loop.rng
        self.history = History()
        self.last_version = loop.rng.randint(2, 5)
        self.names = [f"e{i}" for i in range(loop.rng.randint(1, 3))]
        self.faults_left = loop.rng.choice([0, 1, 2, 4, 6])
        self.mode = loop.rng.choice(["abort", "retract", "drain"])
        self.stages = loop.rng.random() < 0.5
        self.processes: dict[tuple[str, int], SimEngine] = {}
        self.engines: dict[str, SimEngine] = {}  # the newest incarnations
        self.coordinator = Coordinator(
            make_engine=lambda info: self.processes[info.name, info.incarnation],
            interrupt=self.mode,
            timeout_s=TIMEOUT_S,
        )
        self._show = self.coordinator._update
        self.coordinator._update = self._observed_update  # type: ignore[method-assign]
        self.met: dict[str, tuple[int, str]] = {}  # the trainer's: name -> (incarnation, weight group)
        self.num_meetings = self.num_running = 0
        self.next_fault = ""  # of the network
        self.dead_rank = -1
        self.landing = False  # the order under way is one to land
        self.over = False
        self.tasks: list[asyncio.Task[Any]] = []

    async def _observed_update(self, **changes: Any) -> None:
        await self._show(**changes)
        look(self.history, self.processes, self.coordinator.state)

    def note_crash(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self.over and context["message"].startswith("Exception in callback"):
            self.history.broken.append(f"{context['message']}: {context['exception']!r}")

    async def run(self) -> History:
        self.loop.set_exception_handler(self.note_crash)
        for name in self.names:
            self.begin(self.bring_up(name, 0))
        self.begin(self.break_things())
        self.begin(self.replace_the_hopeless())
        for _ in range(2):
            self.begin(self.send_requests())
        trainer = self.loop.create_task(self.train())
        try:
            async with asyncio.timeout(VIRTUAL_LIMIT_S):
                await trainer
                self.history.end = "done"
        except (TrainerDied, EngineError) as error:
            self.history.end = f"{type(error).__name__}"
            await asyncio.sleep(6 * TIMEOUT_S)
            flight = self.coordinator._roster.fleet.flight
            if flight is not None and not flight.source:  # a refill needs no trainer
                self.history.broken.append("a flight outlives its trainer")
        self.over = True
        for task in self.tasks:
            if task.done() and not task.cancelled():
                task.result()
            task.cancel()
        await asyncio.wait(self.tasks)
        self.history.broken = violations(self.history, self.last_version)
        return self.history

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        self.tasks.append(self.loop.create_task(work))

    # --- the launcher ---

    async def bring_up(self, name: str, incarnation: int) -> None:
        engine = SimEngine(self.loop, self.history, name, incarnation)
        engine.peers = self.find
        self.processes[name, incarnation] = self.engines[name] = engine
        await asyncio.sleep(self.rng.random() * 5.0)
        info = EngineInfo(name=name, url="", api_key="", tp=1, incarnation=incarnation)
        with contextlib.suppress(Refused):  # it was ended and replaced while it started
            await self.call(self.coordinator.register_engine, info)

    def find(self, address: str) -> SimEngine | None:
        name, _, incarnation = address.partition(" ")
        return self.processes.get((name, int(incarnation)))

    async def kill(self, name: str) -> None:
        """The death is reported after a while, perhaps after the next start, or not at all."""
        engine = self.engines[name]
        if not engine.alive:
            return
        engine.kill()
        report = EngineLost(name=name, incarnation=engine.incarnation, reason="killed")
        if self.rng.random() < 0.8:
            self.begin(self.later(4.0, lambda: self.call(self.coordinator.engine_lost, report)))
        await asyncio.sleep(self.rng.random() * 2.0)
        self.begin(self.bring_up(name, engine.incarnation + 1))

    async def replace_the_hopeless(self) -> None:
        """The launcher starts an engine anew that the coordinator calls lost though it lives."""
        while not self.over:
            state = self.coordinator.state
            for info in state.engines:
                newest = self.engines[info.name]
                if info.status is EngineStatus.LOST and info.incarnation == newest.incarnation:
                    if newest.alive:
                        self.history.faults.append("hopeless")
                    await self.kill(info.name)
            await self.coordinator.wait_for_change(state.revision, 10.0)

    # --- the network ---

    async def call(self, method: Callable[[Any], Awaitable[Any]], message: Any) -> Any:
        await asyncio.sleep(self.rng.random() * 0.1)
        answer = await method(message)
        await asyncio.sleep(self.rng.random() * 0.1)
        return answer

    async def ask(self, method: Callable[[Any], Awaitable[Any]], message: Any) -> Any:
        """A request of the trainer, which may be lost, or lose its answer, or come a second time."""
        fault, self.next_fault = self.next_fault, ""
        if fault == "request lost":
            raise TrainerDied(fault)
        try:
            answer = await self.call(method, message)
        except Refused as refusal:
            self.history.refusals.append(str(refusal))
            raise
        if fault == "answer lost":
            raise TrainerDied(fault)
        if fault == "again":
            self.begin(self.later(3.0, lambda: self.again(method, message)))
        return answer

    async def again(self, method: Callable[[Any], Awaitable[Any]], message: Any) -> None:
        try:
            await method(message)
        except (Refused, EngineError) as refusal:
            self.history.refusals.append(str(refusal))
        else:
            self.history.broken.append(f"a second {type(message).__name__} was accepted")

    async def later(self, seconds: float, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        await asyncio.sleep(self.rng.random() * seconds)
        await work()

    # --- the trainer ---

    async def train(self) -> None:
        while len(self.coordinator.state.engines) < len(self.names):
            await asyncio.sleep(0.5)
        for version in range(self.last_version + 1):
            while not await self.bring(version, alone=False):
                await asyncio.sleep(0.5)
            for _ in range(self.rng.randint(0, 3)):
                await asyncio.sleep(self.rng.random() * 3.0)
                await self.catch_up(version)
        while not self.everybody_serves():
            await asyncio.sleep(0.5)
            await self.catch_up(self.last_version)

    async def catch_up(self, version: int) -> None:
        """No engine taking it is no reason to end."""
        with contextlib.suppress(EngineError):
            await self.bring(version, alone=True)

    def everybody_serves(self) -> bool:
        engines = self.coordinator.state.engines
        ended = not self.faults_left and all(engine.alive for engine in self.engines.values())
        return ended and all(
            info.status is EngineStatus.SERVING
            and info.incarnation == self.engines[info.name].incarnation
            and not self.engines[info.name]._paused
            for info in engines
        )

    async def bring(self, version: int, alone: bool) -> bool:
        """One flight, as `PolicyPublisher` does it; returns whether there was one."""
        await self.meet_all()
        state = self.coordinator.state
        fresh = {e.name for e in state.engines if e.status is EngineStatus.JOINING}
        current = {e.name: e for e in state.engines}
        names = {
            name
            for name, (incarnation, _) in self.met.items()
            if current[name].incarnation == incarnation
            and current[name].status in (EngineStatus.JOINING, EngineStatus.SERVING)
            and current[name].joined
        }
        names = names & fresh if alone else names
        if not names:
            return False
        plans = {name: plan_of(name, self.met[name][0]) for name in sorted(names)}
        served = frozenset(e.name for e in state.engines if e.status is EngineStatus.SERVING)
        order = Publication(version=version, epoch=state.epoch, plans=plans)
        self.landing = False
        try:
            if self.stages and not alone:
                result = await self.stage_and_land(order)
            else:
                result = await self.fly(order)
        except Refused as refusal:  # the engines have changed, or a rival publishes
            self.judge(refusal, order)
            return False
        check_result(self.history, self.engines, result, served & names)
        return True

    def judge(self, refusal: Refused, order: Publication) -> None:
        """Of what refills may not be the cause: such a refusal would end the run."""
        flight = self.coordinator._roster.fleet.flight
        refilling = flight is not None and flight.source
        if refilling and self.coordinator.state.epoch == order.epoch:
            self.history.broken.append(f"a refill does not let the trainer wait: {refusal}")
        if self.landing and "leaves out" in str(refusal):
            self.history.broken.append(f"a staged version cannot land: {refusal}")

    async def fly(self, order: Publication) -> PublicationResult:
        ready = await self.ask(self.coordinator.prepare, order)
        await self.ask(self.coordinator.transfer, FlightName(version=order.version, epoch=order.epoch))
        failures = await self.send_to_all(ready, order.version)
        commit = CommitOrder(version=order.version, epoch=order.epoch, failures=failures)
        result: PublicationResult = await self.ask(self.coordinator.commit, commit)
        return result

    async def stage_and_land(self, order: Publication) -> PublicationResult:
        staging = StageOrder(**dict(order), place="device")
        ready = await self.ask(self.coordinator.stage, staging)
        failures = await self.send_to_all(ready, order.version)
        for name in sorted(set(ready) - failures.keys()):
            engine = self.processes[name, self.met[name][0]]
            if engine.staging is not None:
                await asyncio.wait({engine.staging}, timeout=TIMEOUT_S)
            if engine._staged != order.version or not engine.alive:
                failures[name] = f"{name} could not verify"
                self.met.pop(name)
        landing = Landing(version=order.version, failures=failures)
        self.landing = True
        result: PublicationResult = await self.ask(self.coordinator.land, landing)
        return result

    async def send_to_all(self, names: Sequence[str], version: int) -> dict[str, str]:
        """Why some engines did not get all halves; they are met again."""
        sends = [self.send(name, rank, version) for name in names for rank in range(NUM_RANKS)]
        reasons = await asyncio.gather(*sends)
        if self.dead_rank >= 0:
            raise TrainerDied(f"rank {self.dead_rank} was killed")
        failures = {reason.split()[0]: reason for reason in reasons if reason}
        for name in failures:
            self.met.pop(name, None)
        return failures

    async def send(self, name: str, rank: int, version: int) -> str:
        """One rank's half for one engine; returns why it did not get there."""
        incarnation, group = self.met[name]
        engine = self.processes[name, incarnation]
        await asyncio.sleep(self.rng.random() * 1.0)
        deadline = self.loop.time() + TIMEOUT_S
        while (engine.receiving, engine.group) != (version, group):
            if self.loop.time() > deadline or not engine.alive or self.dead_rank == rank:
                return f"{name} did not take the half of rank {rank}"
            await asyncio.sleep(0.1)
        if self.dead_rank != rank:
            engine.arrive(group, version, rank)
        return ""

    async def meet_all(self) -> None:
        """Join a weight group with every engine that came, or was quarantined, or refilled by another."""
        for info in self.coordinator.state.engines:
            met = self.met.get(info.name)
            joined = met is not None and met[0] == info.incarnation and info.joined
            refilled = info.status is EngineStatus.SERVING and not info.joined
            if (info.status in WAITING and not joined) or refilled:
                self.met.pop(info.name, None)
                await self.meet(info)

    async def meet(self, info: EngineInfo) -> None:
        self.num_meetings += 1
        group = WeightGroup(f"weights-{info.name}-{self.num_meetings}", "127.0.0.1", 1, 2, 3)
        try:
            await self.call(self.coordinator.join_weight_group, JoinOrder(engine=info.name, group=group))
        except Refused:  # it was lost since
            return
        await asyncio.sleep(self.rng.random())
        failure = "the trainer timed out" if self.rng.random() < 0.02 else ""
        joined = Joined(engine=info.name, plan=plan_of(info.name, info.incarnation), failure=failure)
        if not await self.call(self.coordinator.joined, joined):
            self.met[info.name] = info.incarnation, group.name

    # --- requests ---

    async def send_requests(self) -> None:
        """Follow the state, sometimes late, and sample from whoever serves."""
        while not self.over:
            state = self.coordinator.state
            serving = [e for e in state.engines if e.status is EngineStatus.SERVING]
            if not serving or state.draining:
                await self.coordinator.wait_for_change(state.revision, 5.0)
                continue
            await asyncio.sleep(self.rng.choice([0.0, 0.3]) * self.rng.random())
            info = self.rng.choice(serving)
            await self.count_running(+1)
            request = GenerateRequest(new_rid(), (1, 2, 3), self.rng.randint(1, 8))
            try:
                generation = await self.processes[info.name, info.incarnation].generate(request, 500.0)
            except EngineError:
                await asyncio.sleep(0.2)
                continue
            finally:
                await self.count_running(-1)
            newest = self.coordinator._roster.fleet.committed
            for segment in generation.segments:
                if not state.policy_version <= segment.policy_version <= newest:
                    self.history.broken.append(
                        f"{info.name}: a token of {segment.policy_version} between"
                        f" {state.policy_version} and {newest}"
                    )
            await asyncio.sleep(self.rng.random() * 0.1)

    async def count_running(self, change: int) -> None:
        self.num_running += change
        await self.coordinator.rollout_report(RolloutReport(counts=LedgerCounts(running=self.num_running)))

    # --- faults ---

    async def break_things(self) -> None:
        while self.faults_left and not self.over:
            await asyncio.sleep(self.rng.random() * 6.0)
            name = self.rng.choice(self.names)
            if name in self.engines:
                fault = self.rng.choice(
                    [self.lose, self.fail, self.hang, self.spoil, self.confuse, self.rival]
                )
                await fault(name)
            self.faults_left -= 1

    async def lose(self, name: str) -> None:
        self.history.faults.append("kill")
        await self.kill(name)

    async def fail(self, name: str) -> None:
        method = self.rng.choice(METHODS)
        self.history.faults.append(f"fail {method}")
        self.engines[name].fail_next(method, f"{method} went wrong")
        await self.let_it_happen(name, method)

    async def hang(self, name: str) -> None:
        method = self.engines[name].hangs_in = self.rng.choice(METHODS)
        self.history.faults.append(f"hang {method}")
        await self.let_it_happen(name, method)

    async def let_it_happen(self, name: str, method: str) -> None:
        """Only an engine that is out of service is refilled."""
        if method == "take_weights" and any(e.name == name for e in self.coordinator.state.engines):
            await self.call(self.coordinator.quarantine, EngineFailed(name=name, reason="it is to fail"))

    async def spoil(self, name: str) -> None:
        """Corrupt what arrives, if something does."""
        if self.engines[name].receiving >= 0:
            self.history.faults.append("corrupt")
            self.engines[name].corrupt = True

    async def confuse(self, name: str) -> None:
        if self.rng.random() < 0.3:
            self.history.faults.append("kill rank")
            self.dead_rank = self.rng.randrange(NUM_RANKS)
            return
        self.next_fault = self.rng.choice(["request lost", "answer lost", "again", "again"])
        self.history.faults.append(self.next_fault)

    async def rival(self, name: str) -> None:
        """Somebody else prepares a publication, gives it up, and asks once more without a new look."""
        state = self.coordinator.state
        serving = {e.name: e for e in state.engines if e.status is EngineStatus.SERVING}
        plans = {e.name: plan_of(e.name, e.incarnation) for e in serving.values()}
        version = state.policy_version + 1
        order = FlightName(version=version, epoch=state.epoch)
        try:
            publication = Publication(version=version, epoch=state.epoch, plans=plans)
            await self.coordinator.prepare(publication)
            self.history.faults.append("rival")
            await asyncio.sleep(self.rng.random() * 2.0)
            await self.coordinator.abort(order)
            await self.again(self.coordinator.prepare, publication)
        except (Refused, EngineError) as refusal:
            self.history.faults.append("rival refused")
            self.history.refusals.append(str(refusal))
