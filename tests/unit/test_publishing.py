"""Publications through the coordinator: who serves what, and what is refused."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.control.ledger import LedgerCounts
from asyncrl.control.messages import (
    CommitOrder,
    EngineLost,
    EngineStatus,
    Plan,
    Publication,
    RolloutReport,
)
from asyncrl.control.protocol import MAX_FAILURES, Refused
from asyncrl.engines.base import EngineError, GenerateRequest, new_rid
from asyncrl.engines.scripted import ScriptedEngine
from tests.pace import idle
from tests.unit.scripted_fleet import PLAN, Fleet


async def test_a_publication_reaches_every_engine_and_resumes_it() -> None:
    fleet = Fleet(2)
    await fleet.join()
    await fleet.publish(0)
    assert fleet.result.committed == ("engine-0", "engine-1")
    assert fleet.coordinator.state.policy_version == 0
    assert fleet.coordinator.state.publications == 1
    for name, engine in fleet.engines.items():
        assert fleet.status(name) is EngineStatus.SERVING
        assert await engine.version() == 0
    assert fleet.result.paused_s == {}  # they served nobody before
    await fleet.publish(1)
    assert set(fleet.result.paused_s) == set(fleet.engines)


async def test_running_requests_are_interrupted_and_new_ones_wait_for_the_new_version() -> None:
    fleet = Fleet(1)
    await fleet.join()
    await fleet.publish(0)
    engine = fleet.engines["engine-0"]
    running = asyncio.ensure_future(engine.generate(GenerateRequest(new_rid(), (1, 2), 500), 5.0))
    await idle(0.02)
    order = await fleet.prepare(1)
    cut = await running
    assert cut.finish == "interrupted" and 0 < len(cut.token_ids) < 500
    waiting = asyncio.ensure_future(engine.generate(GenerateRequest(new_rid(), (1, 2), 3), 5.0))
    await idle(0.02)
    assert not waiting.done()
    await fleet.coordinator.transfer(order)
    await fleet.coordinator.commit(order)
    assert {segment.policy_version for segment in (await waiting).segments} == {1}


async def test_an_engine_that_fails_is_quarantined_and_the_others_go_on() -> None:
    fleet = Fleet(2, alike=False)
    await fleet.join()
    await fleet.publish(0)
    fleet.engines["engine-1"].fail_next("receive_weights", "digest of bucket 3 differs")
    await fleet.publish(1)
    assert fleet.result.committed == ("engine-0",)
    assert "digest of bucket 3" in fleet.result.failed["engine-1"]
    assert fleet.status("engine-1") is EngineStatus.QUARANTINED
    assert fleet.coordinator.state.policy_version == 1
    assert await fleet.engines["engine-1"].version() == 0
    assert not await fleet.engines["engine-1"].ready()  # it stays paused: nobody samples from mixed weights
    await fleet.publish(2)
    assert fleet.result.committed == ("engine-0",) and fleet.result.failed == {}


async def test_a_version_that_reaches_no_engine_is_an_error_and_not_committed() -> None:
    fleet = Fleet(1)
    await fleet.join()
    await fleet.publish(0)
    fleet.engines["engine-0"].fail_next("receive_weights", "out of memory")
    with pytest.raises(EngineError, match=r"version 1 reached no engine: .*out of memory"):
        await fleet.publish(1)
    assert fleet.coordinator.state.policy_version == 0


async def test_versions_are_neither_repeated_nor_skipped_nor_published_at_once() -> None:
    fleet = Fleet(1)
    await fleet.join()
    await fleet.publish(0)
    with pytest.raises(Refused, match=r"version 0 was already published \(now 0: engine-0\)"):
        await fleet.prepare(0)
    with pytest.raises(Refused, match="version 2 would skip version 1; 0 is served"):
        await fleet.prepare(2)
    order = await fleet.prepare(1)
    for version in (1, 2):  # a repeated PREPARE, and a publication that races
        raced = (
            rf"version {version} \(epoch {order.epoch}\) cannot .* version 1 \(epoch {order.epoch}\) is in"
        )
        with pytest.raises(Refused, match=raced):
            await fleet.prepare(version)


async def test_a_refusal_names_both_sides() -> None:
    fleet = Fleet(2)
    await fleet.join()
    await fleet.publish(0)
    epoch = fleet.coordinator.state.epoch
    with pytest.raises(Refused, match=rf"membership epoch {epoch - 1}, the engines are at epoch {epoch}"):
        await fleet.prepare(1, epoch=epoch - 1)
    with pytest.raises(Refused, match="version 1 leaves out engine-1, which serve"):
        await fleet.prepare(1, "engine-0")
    other = Plan(plan_hash="00" * 32, manifest_hash="cd" * 32)
    plans = {"engine-0": PLAN, "engine-1": other}
    with pytest.raises(Refused, match=r"for engine-1 follows plan 000000.* it agreed on plan ababab"):
        await fleet.coordinator.prepare(Publication(version=1, epoch=epoch, plans=plans))
    order = await fleet.prepare(1)
    with pytest.raises(Refused, match="came before engine-0, engine-1 was through"):
        await fleet.coordinator.commit(order)
    await fleet.coordinator.transfer(order)
    with pytest.raises(Refused, match=r"TRANSFER of version 1 .* came again"):
        await fleet.coordinator.transfer(order)
    await fleet.coordinator.commit(order)
    with pytest.raises(Refused, match=r"COMMIT of version 1 .* came, but no publication .*now version 1"):
        await fleet.coordinator.commit(order)
    later = await fleet.prepare(2)
    with pytest.raises(Refused, match=r"COMMIT of version 1 .* came, but version 2 .* is in flight"):
        await fleet.coordinator.commit(order)
    await fleet.coordinator.abort(later)
    assert {fleet.status(name) for name in fleet.engines} == {EngineStatus.SERVING}
    assert all([await engine.ready() for engine in fleet.engines.values()])
    await fleet.publish(2)


async def test_an_engine_registers_while_a_publication_is_prepared() -> None:
    fleet = Fleet(2)
    await fleet.register("engine-0")
    await fleet.meet("engine-0")
    epoch = fleet.coordinator.state.epoch
    await fleet.register("engine-1")
    with pytest.raises(Refused, match="epoch"):
        await fleet.prepare(0, "engine-0", epoch=epoch)
    with pytest.raises(Refused, match="engine-1 is joining and has no plan"):
        await fleet.prepare(0, "engine-0", "engine-1")


async def test_a_quarantined_engine_catches_up_alone() -> None:
    fleet = Fleet(2, alike=False)
    await fleet.join()
    await fleet.publish(0)
    fleet.engines["engine-1"].fail_next("receive_weights", "digest of bucket 3 differs")
    await fleet.publish(1)
    assert await fleet.meet("engine-1") == ""
    assert fleet.status("engine-1") is EngineStatus.JOINING
    assert not await fleet.engines["engine-1"].ready()
    await fleet.publish(1, "engine-1")
    assert fleet.result.committed == ("engine-1",) and fleet.result.paused_s == {}
    assert fleet.coordinator.state.publications == 2  # a catch-up is none
    assert {fleet.status(name) for name in fleet.engines} == {EngineStatus.SERVING}
    assert await fleet.engines["engine-1"].version() == 1
    await fleet.publish(2)
    assert fleet.result.committed == ("engine-0", "engine-1")


async def test_an_engine_that_fails_again_and_again_is_lost() -> None:
    fleet = Fleet(2, alike=False)
    await fleet.join()
    await fleet.publish(0)
    for _ in range(MAX_FAILURES):
        fleet.engines["engine-1"].fail_next("receive_weights", "out of memory")
        if fleet.status("engine-1") is EngineStatus.SERVING:
            await fleet.publish(1)
        else:
            assert "out of memory" in await fleet.meet("engine-1")
        assert fleet.status("engine-1") is EngineStatus.QUARANTINED
    fleet.engines["engine-1"].fail_next("join_weight_group", "no route")
    assert "no route" in await fleet.meet("engine-1")
    assert fleet.status("engine-1") is EngineStatus.LOST
    with pytest.raises(Refused, match="engine-1 is lost"):
        await fleet.meet("engine-1")


async def test_an_engine_lost_and_started_again_during_a_publication_catches_up() -> None:
    fleet = Fleet(2, alike=False)
    await fleet.join()
    await fleet.publish(0)
    order = await fleet.prepare(1)
    dead = fleet.engines["engine-1"]
    dead.kill()
    fleet.engines["engine-1"] = ScriptedEngine("engine-1")
    await fleet.register("engine-1", incarnation=1)
    await fleet.coordinator.transfer(order)
    late = EngineLost(name="engine-1", incarnation=0, reason="killed by SIGKILL")
    await fleet.coordinator.engine_lost(late)
    result = await fleet.coordinator.commit(order)
    assert result.committed == ("engine-0",)
    assert result.failed == {"engine-1": "engine-1 was started again"}
    assert fleet.status("engine-1") is EngineStatus.JOINING
    await fleet.meet("engine-1")
    await fleet.publish(1, "engine-1")
    assert fleet.status("engine-1") is EngineStatus.SERVING
    with pytest.raises(Refused, match="registered as start 1, again as start 1"):
        await fleet.register("engine-1", incarnation=1)


async def test_the_next_publication_waits_until_the_engines_of_the_last_one_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(2)
    await fleet.join()
    await fleet.publish(0)
    slow, may_resume = fleet.engines["engine-1"], asyncio.Event()
    resume = slow.resume

    async def slowly() -> None:
        await may_resume.wait()
        await resume()

    monkeypatch.setattr(slow, "resume", slowly)
    order = await fleet.prepare(1)
    await fleet.coordinator.transfer(order)
    committing = asyncio.ensure_future(fleet.coordinator.commit(order))
    await idle(0.05)
    following = Publication(
        version=2, epoch=fleet.coordinator._roster.fleet.epoch, plans=dict.fromkeys(fleet.engines, PLAN)
    )
    preparing = asyncio.ensure_future(fleet.coordinator.prepare(following))
    await idle(0.05)
    assert not committing.done() and not preparing.done()
    may_resume.set()
    assert set((await committing).paused_s) == set(fleet.engines)
    assert await preparing == ("engine-0", "engine-1")
    assert not any([await engine.ready() for engine in fleet.engines.values()])


@pytest.mark.parametrize("call", ["transfer", "commit", "abort"])
async def test_steps_out_of_order_are_refused(call: str) -> None:
    fleet = Fleet(1)
    await fleet.join()
    with pytest.raises(Refused, match="no publication was prepared"):
        await getattr(fleet.coordinator, call)(CommitOrder(version=1, epoch=0))


async def test_drain_waits_for_the_rollouter() -> None:
    fleet = Fleet(1, interrupt="drain")
    await fleet.join()
    await fleet.publish(0)
    await fleet.coordinator.rollout_report(RolloutReport(counts=LedgerCounts(running=3)))
    preparing = asyncio.ensure_future(fleet.prepare(1))
    await idle(0.05)
    assert fleet.coordinator.state.draining and not preparing.done()
    await fleet.coordinator.rollout_report(RolloutReport())
    await asyncio.wait_for(preparing, 2.0)
    assert fleet.prepared == ("engine-0",)


async def test_drain_has_a_deadline_that_names_the_samples() -> None:
    fleet = Fleet(1, interrupt="drain")
    await fleet.join()
    await fleet.publish(0)
    await fleet.coordinator.rollout_report(RolloutReport(counts=LedgerCounts(running=3)))
    with pytest.raises(EngineError, match="3 samples still run"):
        await fleet.prepare(1)
    assert fleet.status("engine-0") is EngineStatus.SERVING and not fleet.coordinator.state.draining
    assert await fleet.engines["engine-0"].ready()
