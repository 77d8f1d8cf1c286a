"""A coordinator over scripted engines, and the calls that a trainer makes."""

from __future__ import annotations

from asyncrl.control.coordinator import Coordinator
from asyncrl.control.messages import (
    CommitOrder,
    EngineInfo,
    EngineStatus,
    Joined,
    JoinOrder,
    Plan,
    Publication,
)
from asyncrl.engines.base import Interrupt, WeightGroup
from asyncrl.engines.scripted import ScriptedEngine


class Fleet:
    """A coordinator over scripted engines that have joined their weight groups.

    With ``alike`` False each has another number of ranks, so that none can be refilled from another.
    """

    def __init__(self, num_engines: int, interrupt: Interrupt = "abort", alike: bool = True) -> None:
        self._alike = alike
        self.engines = {
            f"engine-{idx}": ScriptedEngine(f"engine-{idx}", token_interval_s=0.001)
            for idx in range(num_engines)
        }
        for engine in self.engines.values():
            engine.peers = self.engines.get
        self.coordinator = Coordinator(
            make_engine=lambda info: self.engines[info.name], interrupt=interrupt, timeout_s=2.0
        )

    def replace(self, name: str, engine: ScriptedEngine | None = None) -> ScriptedEngine:
        """The next start of an engine; it has yet to register."""
        self.engines[name] = engine or ScriptedEngine(name)
        self.engines[name].peers = self.engines.get
        return self.engines[name]

    async def join(self) -> None:
        for name in self.engines:
            await self.register(name)
            assert await self.meet(name) == ""

    async def register(self, name: str, incarnation: int = 0) -> None:
        tp = 1 if self._alike else 1 + list(self.engines).index(name)
        info = EngineInfo(name=name, url="", api_key="", tp=tp, incarnation=incarnation)
        await self.coordinator.register_engine(info)

    async def meet(self, name: str) -> str:
        await self.coordinator.join_weight_group(join_order(name))
        return await self.coordinator.joined(Joined(engine=name, plan=PLAN))

    async def prepare(self, version: int, *names: str, epoch: int | None = None) -> CommitOrder:
        """By default for every engine that has joined."""
        ready = (EngineStatus.SERVING, EngineStatus.JOINING)
        names = names or tuple(e.name for e in self.coordinator.state.engines if e.status in ready)
        order = CommitOrder(version=version, epoch=self.coordinator.state.epoch if epoch is None else epoch)
        plans = dict.fromkeys(names, PLAN)
        self.prepared = await self.coordinator.prepare(
            Publication(version=version, epoch=order.epoch, plans=plans)
        )
        return order

    async def publish(self, version: int, *names: str) -> None:
        order = await self.prepare(version, *names)
        await self.coordinator.transfer(order)
        self.result = await self.coordinator.commit(order)

    def status(self, name: str) -> EngineStatus:
        return self.coordinator.state.engine(name).status


PLAN = Plan(plan_hash="ab" * 32, manifest_hash="cd" * 32)


def join_order(name: str) -> JoinOrder:
    return JoinOrder(engine=name, group=WeightGroup(f"weights-{name}", "127.0.0.1", 1, 1, 2))
