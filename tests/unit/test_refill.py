"""Refills through the coordinator: who gets the committed version from whom, and what happens around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.control.messages import (
    EngineFailed,
    EngineLost,
    EngineStatus,
    Joined,
    Landing,
    StageOrder,
)
from asyncrl.control.protocol import MAX_FAILURES, Refused
from asyncrl.engines.base import EngineError
from asyncrl.engines.scripted import ScriptedEngine
from tests.pace import idle
from tests.unit.scripted_fleet import PLAN, Fleet, join_order

SERVING, JOINING = EngineStatus.SERVING, EngineStatus.JOINING
QUARANTINED, PREPARED, LOST = EngineStatus.QUARANTINED, EngineStatus.PREPARED, EngineStatus.LOST


async def published(num_engines: int, version: int = 0) -> Fleet:
    fleet = Fleet(num_engines)
    await fleet.join()
    for each in range(version + 1):
        await fleet.publish(each)
    return fleet


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.005)


async def settled() -> None:
    """Long enough for a refill among engines that have no fault."""
    await idle(0.1)


async def restart(fleet: Fleet, name: str, incarnation: int = 1) -> ScriptedEngine:
    fleet.engines[name].kill()
    await fleet.coordinator.engine_lost(EngineLost(name=name, incarnation=incarnation - 1, reason="killed"))
    engine = fleet.replace(name)
    await fleet.register(name, incarnation)
    return engine


class Gate:
    """Holds one call of an engine until it is told to go on."""

    def __init__(self, engine: ScriptedEngine, method: str) -> None:
        self.entered, self.go = asyncio.Event(), asyncio.Event()
        self._call = getattr(engine, method)
        setattr(engine, method, self._held)

    async def _held(self, *arguments: Any) -> Any:
        self.entered.set()
        await self.go.wait()
        return await self._call(*arguments)


async def test_an_engine_that_comes_back_serves_before_the_trainer_looks() -> None:
    fleet = await published(2, version=1)
    engine = await restart(fleet, "engine-1")
    await until(lambda: fleet.status("engine-1") is SERVING)
    info = fleet.coordinator.state.engine("engine-1")
    assert (info.policy_version, info.joined, info.incarnation) == (1, False, 1)
    assert await engine.version() == 1 and await engine.ready()
    assert await fleet.engines["engine-0"].ready()
    assert fleet.coordinator.state.publications == 2
    with pytest.raises(Refused, match="version 2 leaves out engine-1, which serve"):
        await fleet.prepare(2, "engine-0")
    with pytest.raises(Refused, match="engine-1 is serving and has no plan"):
        await fleet.prepare(2)
    assert await fleet.meet("engine-1") == ""
    assert fleet.coordinator.state.engine("engine-1").joined and await engine.ready()
    await fleet.publish(2)
    assert set(fleet.result.paused_s) == {"engine-0", "engine-1"}


async def test_it_serves_on_while_it_meets_the_trainer() -> None:
    fleet = await published(2)
    engine = await restart(fleet, "engine-1")
    await until(lambda: fleet.status("engine-1") is SERVING)
    meeting = Gate(engine, "join_weight_group")
    await fleet.coordinator.join_weight_group(join_order("engine-1"))
    await meeting.entered.wait()
    assert fleet.status("engine-1") is SERVING and await engine.ready()
    meeting.go.set()
    assert await fleet.coordinator.joined(Joined(engine="engine-1", plan=PLAN)) == ""


async def test_one_that_serves_and_cannot_be_met_is_put_out() -> None:
    fleet = await published(2)
    engine = await restart(fleet, "engine-1")
    await until(lambda: fleet.status("engine-1") is SERVING)
    fleet.engines["engine-0"].fail_next("give_weights", "is busy")
    engine.fail_next("join_weight_group", "no route")
    assert "no route" in await fleet.meet("engine-1")
    assert fleet.status("engine-1") is QUARANTINED and not await engine.ready()


async def test_a_quarantined_engine_is_refilled() -> None:
    fleet = await published(2)
    fleet.engines["engine-1"].fail_next("receive_weights", "digest of bucket 3 differs")
    await fleet.publish(1)
    assert fleet.result.committed == ("engine-0",)
    await until(lambda: fleet.status("engine-1") is SERVING)
    assert await fleet.engines["engine-1"].version() == 1
    assert fleet.engines["engine-1"].weight_groups == set()  # the old one is void
    assert await fleet.meet("engine-1") == ""
    await fleet.publish(2)


async def test_sources_take_turns() -> None:
    fleet = await published(3)
    sources = []
    for incarnation in (1, 2, 3, 4):
        before = {name: len(engine.given) for name, engine in fleet.engines.items()}
        await restart(fleet, "engine-2", incarnation)
        await until(lambda: fleet.status("engine-2") is SERVING)
        sources += [name for name, engine in fleet.engines.items() if len(engine.given) > before[name]]
    assert sources == ["engine-0", "engine-1", "engine-0", "engine-1"]


@pytest.mark.parametrize("num_ranks_differ", [True, False])
async def test_where_nobody_can_give_the_trainer_brings_the_version(num_ranks_differ: bool) -> None:
    fleet = Fleet(2, alike=not num_ranks_differ)
    await fleet.join()
    await fleet.publish(0)
    if not num_ranks_differ:
        fleet.engines["engine-0"].kill()
        report = EngineLost(name="engine-0", incarnation=0, reason="killed")
        await fleet.coordinator.engine_lost(report)
    await restart(fleet, "engine-1")
    await settled()
    assert fleet.status("engine-1") is JOINING
    assert await fleet.meet("engine-1") == ""
    await fleet.publish(0, "engine-1")
    assert fleet.status("engine-1") is SERVING


async def test_nothing_is_refilled_before_the_first_publication() -> None:
    fleet = Fleet(2)
    await fleet.register("engine-0")
    await fleet.register("engine-1")
    await settled()
    assert {fleet.status(name) for name in fleet.engines} == {JOINING}
    assert fleet.coordinator._roster.fleet.flight is None


async def test_an_engine_that_meets_the_trainer_is_not_refilled() -> None:
    fleet = await published(2)
    gate = Gate(fleet.replace("engine-1"), "join_weight_group")
    registering = fleet.register("engine-1", 1)
    await asyncio.gather(registering, fleet.coordinator.join_weight_group(join_order("engine-1")))
    await gate.entered.wait()
    await settled()
    assert fleet.status("engine-1") is JOINING
    gate.go.set()
    assert await fleet.coordinator.joined(Joined(engine="engine-1", plan=PLAN)) == ""
    await settled()
    assert fleet.status("engine-1") is JOINING  # the trainer is about to bring it the version
    await fleet.publish(0, "engine-1")


# --- failures ---


@pytest.mark.parametrize("how", ["refuses", "dies", "hangs", "is quarantined"])
async def test_a_source_that_fails_before_the_transfer_is_replaced(how: str) -> None:
    fleet = await published(3)
    gate = Gate(fleet.engines["engine-0"], "give_weights")
    await restart(fleet, "engine-2")
    await gate.entered.wait()
    if how == "refuses":
        fleet.engines["engine-0"].fail_next("give_weights", "has no port left")
    elif how == "dies":
        fleet.engines["engine-0"].kill()
    elif how == "is quarantined":
        await fleet.coordinator.quarantine(EngineFailed(name="engine-0", reason="rank 1 could not send"))
        fleet.engines["engine-0"].kill()
    if how != "hangs":
        gate.go.set()
    await until(lambda: fleet.status("engine-2") is SERVING)
    assert fleet.engines["engine-1"].given and fleet.engines["engine-2"].weight_groups == set()
    assert fleet.coordinator._roster.fleet.members["engine-2"].num_failures == 0


@pytest.mark.parametrize("is_reported", [True, False])
async def test_a_source_that_dies_in_the_transfer_is_replaced(is_reported: bool) -> None:
    fleet = await published(3)
    engine = fleet.replace("engine-2")
    gate = Gate(engine, "take_weights")
    await fleet.register("engine-2", 1)
    await gate.entered.wait()
    assert fleet.status("engine-2") is PREPARED
    fleet.engines["engine-0"].kill()
    if is_reported:
        report = EngineLost(name="engine-0", incarnation=0, reason="killed")
        await fleet.coordinator.engine_lost(report)
    gate.go.set()
    await until(lambda: fleet.status("engine-2") is SERVING)
    assert fleet.engines["engine-1"].given and await engine.version() == 0
    assert fleet.coordinator._roster.fleet.members["engine-2"].num_failures == 0


async def test_what_comes_from_a_source_that_is_put_out_is_not_served() -> None:
    fleet = await published(2)
    engine = fleet.replace("engine-1")
    gate = Gate(engine, "take_weights")
    await fleet.register("engine-1", 1)
    await gate.entered.wait()
    await fleet.coordinator.quarantine(EngineFailed(name="engine-0", reason="rank 1 could not send"))
    gate.go.set()
    await until(lambda: fleet.status("engine-1") is QUARANTINED)
    member = fleet.coordinator._roster.fleet.members["engine-1"]
    assert member.reason == "engine-0, which gave it, was put out: rank 1 could not send"
    assert member.num_failures == 0 and not await engine.ready()


async def test_the_last_source_gone_leaves_the_engine_to_the_trainer() -> None:
    fleet = await published(2)
    engine = fleet.replace("engine-1")
    gate = Gate(engine, "take_weights")
    await fleet.register("engine-1", 1)
    await gate.entered.wait()
    fleet.engines["engine-0"].kill()
    gate.go.set()
    await until(lambda: fleet.status("engine-1") is QUARANTINED)
    await settled()
    assert fleet.status("engine-1") is QUARANTINED and not await engine.ready()
    assert await fleet.meet("engine-1") == ""
    assert fleet.status("engine-1") is JOINING


async def test_a_target_that_dies_leaves_its_source_alone() -> None:
    fleet = await published(2)
    engine = fleet.replace("engine-1")
    gate = Gate(engine, "take_weights")
    await fleet.register("engine-1", 1)
    await gate.entered.wait()
    engine.kill()
    await fleet.coordinator.engine_lost(EngineLost(name="engine-1", incarnation=1, reason="killed"))
    await until(lambda: fleet.coordinator._roster.fleet.flight is None)
    assert (fleet.status("engine-0"), fleet.status("engine-1")) == (SERVING, LOST)
    await restart(fleet, "engine-1", incarnation=2)
    await until(lambda: fleet.status("engine-1") is SERVING)


async def test_refills_that_fail_leave_the_last_attempt_to_the_trainer() -> None:
    fleet = await published(2)
    engine = fleet.replace("engine-1")
    failures = 0

    async def fails(*arguments: Any) -> None:
        nonlocal failures
        failures += 1
        raise EngineError("engine engine-1 runs out of memory")

    engine.take_weights = fails  # type: ignore[method-assign, assignment]
    await fleet.register("engine-1", 1)
    await until(lambda: failures == MAX_FAILURES)
    await settled()
    assert failures == MAX_FAILURES and fleet.status("engine-1") is QUARANTINED
    assert "out of memory" in fleet.coordinator.state.engine("engine-1").reason
    engine.fail_next("join_weight_group", "no route")
    assert "no route" in await fleet.meet("engine-1")
    assert fleet.status("engine-1") is LOST


async def test_one_that_can_be_refilled_and_never_met_is_lost_in_the_end() -> None:
    fleet = await published(2)
    await restart(fleet, "engine-1")
    for _ in range(MAX_FAILURES):
        await until(lambda: fleet.status("engine-1") is SERVING)
        fleet.engines["engine-1"].fail_next("join_weight_group", "no route")
        assert "no route" in await fleet.meet("engine-1")
    await settled()
    assert fleet.status("engine-1") is QUARANTINED  # another refill would not help
    fleet.engines["engine-1"].fail_next("join_weight_group", "no route")
    await fleet.meet("engine-1")
    assert fleet.status("engine-1") is LOST


# --- the trainer meanwhile ---


async def test_a_publication_waits_for_a_refill_and_goes_first_afterwards() -> None:
    fleet = await published(3)
    gates = {name: Gate(fleet.replace(name), "take_weights") for name in ("engine-1", "engine-2")}
    gates["engine-2"].go.set()
    await fleet.register("engine-1", 1)
    await gates["engine-1"].entered.wait()
    await fleet.register("engine-2", 1)
    preparing = asyncio.ensure_future(fleet.prepare(1, "engine-0"))
    await settled()
    assert not preparing.done()
    gates["engine-1"].go.set()
    with pytest.raises(Refused, match=r"leaves out engine-1|look at the engines again"):
        await preparing
    assert fleet.status("engine-1") is SERVING
    await settled()
    assert fleet.status("engine-2") is JOINING  # the trainer is about to try again
    await fleet.meet("engine-1")
    await fleet.publish(1, "engine-0", "engine-1")
    await until(lambda: fleet.status("engine-2") is SERVING)
    assert await fleet.engines["engine-2"].version() == 1


async def test_refills_go_on_where_the_trainer_does_not_come_back() -> None:
    fleet = await published(3)
    gate = Gate(fleet.replace("engine-1"), "take_weights")
    fleet.replace("engine-2")
    await fleet.register("engine-1", 1)
    await gate.entered.wait()
    await fleet.register("engine-2", 1)
    preparing = asyncio.ensure_future(fleet.prepare(1, "engine-0"))
    await settled()
    gate.go.set()
    with pytest.raises(Refused):
        await preparing
    await until(lambda: fleet.status("engine-2") is SERVING)


async def test_a_staged_version_lands_before_an_engine_is_refilled() -> None:
    fleet = await published(3)
    order = StageOrder(
        version=1,
        epoch=fleet.coordinator.state.epoch,
        plans=dict.fromkeys(fleet.engines, PLAN),
        place="device",
    )
    await fleet.coordinator.stage(order)
    await restart(fleet, "engine-2")
    await settled()
    assert fleet.status("engine-2") is JOINING
    result = await fleet.coordinator.land(Landing(version=1))
    assert result.committed == ("engine-0", "engine-1")
    await until(lambda: fleet.status("engine-2") is SERVING)
    assert await fleet.engines["engine-2"].version() == 1


async def test_a_landing_that_fails_lets_refills_begin() -> None:
    fleet = await published(2)
    order = StageOrder(
        version=1,
        epoch=fleet.coordinator.state.epoch,
        plans={"engine-0": PLAN, "engine-1": PLAN},
        place="host",
    )
    await fleet.coordinator.stage(order)
    failures = {"engine-0": "it did not verify"}
    fleet.engines["engine-1"].fail_next("receive_weights", "out of memory")
    with pytest.raises(EngineError, match="version 1 reached no engine"):
        await fleet.coordinator.land(Landing(version=1, failures=failures))
    assert not fleet.coordinator._staging.waits_to_land


async def test_staging_waits_for_a_refill() -> None:
    fleet = await published(2)
    gate = Gate(fleet.replace("engine-1"), "take_weights")
    await fleet.register("engine-1", 1)
    await gate.entered.wait()
    order = StageOrder(
        version=1, epoch=fleet.coordinator.state.epoch, plans={"engine-0": PLAN}, place="device"
    )
    staging = asyncio.ensure_future(fleet.coordinator.stage(order))
    await settled()
    assert not staging.done()
    gate.go.set()
    with pytest.raises(Refused):
        await staging
    assert fleet.status("engine-1") is SERVING and order.epoch < fleet.coordinator.state.epoch
