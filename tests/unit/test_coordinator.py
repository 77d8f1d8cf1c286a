"""The publication protocol and the control port, with scripted engines and real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest

from asyncrl.control.client import AsyncControlClient, ControlAddress, ControlClient, ControlError
from asyncrl.control.coordinator import Coordinator, ProtocolError
from asyncrl.control.messages import (
    CheckpointDone,
    EngineInfo,
    EngineStatus,
    Phase,
    ProcessInfo,
    Publication,
    RolloutReport,
    StepDone,
    TrainerStart,
    WeightGroup,
)
from asyncrl.control.server import build_app, serve
from asyncrl.engines.base import EngineError, GenerateRequest, new_rid
from asyncrl.engines.scripted import ScriptedEngine

TOKEN = "secret"


class Fleet:
    """A coordinator over scripted engines that have joined their weight groups."""

    def __init__(self, num_engines: int, interrupt: str = "abort") -> None:
        self.engines = {
            f"engine-{idx}": ScriptedEngine(f"engine-{idx}", token_interval_s=0.001)
            for idx in range(num_engines)
        }
        self.coordinator = Coordinator(
            make_engine=lambda info: self.engines[info.name], interrupt=interrupt, timeout_s=2.0
        )

    async def join(self) -> None:
        for name in self.engines:
            await self.coordinator.register_engine(EngineInfo(name=name, url="", api_key="", tp=1))
            await self.coordinator.join_weight_group(group(name))
            await self.coordinator.finish_joining(name)

    async def publish(self, version: int) -> None:
        names = await self.coordinator.prepare(publication(version, self.engines))
        await self.coordinator.transfer({name: f"weights-{name}" for name in names})
        self.result = await self.coordinator.commit()

    def status(self, name: str) -> EngineStatus:
        return self.coordinator.state.engine(name).status


def group(name: str) -> WeightGroup:
    return WeightGroup(
        engine=name,
        master_address="127.0.0.1",
        master_port=1,
        rank_offset=1,
        world_size=2,
        group_name=f"weights-{name}",
        backend="gloo",
    )


def publication(version: int, engines: Iterable[str]) -> Publication:
    return Publication(version=version, plan_hashes=dict.fromkeys(engines, "hash"))


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
        assert fleet.result.paused_s[name] >= 0


async def test_running_requests_are_interrupted_and_new_ones_wait_for_the_new_version() -> None:
    fleet = Fleet(1)
    await fleet.join()
    await fleet.publish(0)
    engine = fleet.engines["engine-0"]
    running = asyncio.ensure_future(engine.generate(GenerateRequest(new_rid(), (1, 2), 500), 5.0))
    await asyncio.sleep(0.02)
    names = await fleet.coordinator.prepare(publication(1, fleet.engines))
    cut = await running
    assert cut.finish == "interrupted" and 0 < len(cut.token_ids) < 500
    waiting = asyncio.ensure_future(engine.generate(GenerateRequest(new_rid(), (1, 2), 3), 5.0))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await fleet.coordinator.transfer(dict.fromkeys(names, "weights-engine-0"))
    await fleet.coordinator.commit()
    assert {segment.policy_version for segment in (await waiting).segments} == {1}


async def test_an_engine_that_fails_is_quarantined_and_the_others_go_on() -> None:
    fleet = Fleet(2)
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


async def test_versions_are_neither_repeated_nor_published_at_once() -> None:
    fleet = Fleet(1)
    await fleet.join()
    await fleet.publish(0)
    with pytest.raises(ProtocolError, match="already published"):
        await fleet.coordinator.prepare(publication(0, fleet.engines))
    await fleet.coordinator.prepare(publication(1, fleet.engines))
    with pytest.raises(ProtocolError, match="while version 1 is in flight"):
        await fleet.coordinator.prepare(publication(2, fleet.engines))


@pytest.mark.parametrize("call", ["transfer", "commit"])
async def test_steps_out_of_order_are_refused(call: str) -> None:
    fleet = Fleet(1)
    await fleet.join()
    with pytest.raises(ProtocolError, match="no publication was prepared"):
        await (fleet.coordinator.commit() if call == "commit" else fleet.coordinator.transfer({}))


async def test_drain_waits_for_the_rollouter() -> None:
    fleet = Fleet(1, interrupt="drain")
    await fleet.join()
    await fleet.publish(0)
    await fleet.coordinator.rollout_report(RolloutReport(running=3))
    preparing = asyncio.ensure_future(fleet.coordinator.prepare(publication(1, fleet.engines)))
    await asyncio.sleep(0.05)
    assert fleet.coordinator.state.draining and not preparing.done()
    await fleet.coordinator.rollout_report(RolloutReport(running=0))
    assert await asyncio.wait_for(preparing, 2.0) == ("engine-0",)


async def test_drain_has_a_deadline_that_names_the_samples() -> None:
    fleet = Fleet(1, interrupt="drain")
    await fleet.join()
    await fleet.publish(0)
    await fleet.coordinator.rollout_report(RolloutReport(running=3))
    with pytest.raises(EngineError, match="3 samples still run"):
        await fleet.coordinator.prepare(publication(1, fleet.engines))


async def test_batches_are_reported_in_order() -> None:
    fleet = Fleet(0)
    await fleet.coordinator.trainer_started(TrainerStart(step=4, policy_version=4, rings=("r",)))
    await fleet.coordinator.step_done(StepDone(batch_idx=4))
    assert fleet.coordinator.state.batches_trained == 5
    with pytest.raises(ProtocolError, match="expected batch 5"):
        await fleet.coordinator.step_done(StepDone(batch_idx=4))


@pytest.fixture
async def address() -> AsyncIterator[ControlAddress]:
    fleet = Fleet(1)
    runner, url = await serve(build_app(fleet.coordinator, TOKEN), "127.0.0.1", 0)
    yield ControlAddress(url, TOKEN)
    await runner.cleanup()


async def test_both_clients_speak_to_the_port(address: ControlAddress) -> None:
    client, blocking = AsyncControlClient(address), ControlClient(address)
    await client.post("processes", ProcessInfo(name="rank 0", pid=7))
    start = TrainerStart(step=0, policy_version=0, rings=("r",))
    await asyncio.to_thread(blocking.post, "trainer/start", start)
    await asyncio.to_thread(blocking.post, "phase", Phase.TRAINING)
    await client.post("trainer/checkpoint", CheckpointDone(step=3, oldest_step=1))
    state = await asyncio.to_thread(blocking.state)
    assert state == await client.state()
    assert (state.phase, state.checkpoint_step, state.processes[0].pid) == (Phase.TRAINING, 3, 7)
    await client.post("failure", "first")
    await client.post("failure", "second")
    await client.post("stop")
    state = await client.state()
    assert state.failure == "first" and state.stop_requested
    await client.close()


async def test_a_poll_waits_for_a_change_and_ends_without_one(address: ControlAddress) -> None:
    client = AsyncControlClient(address)
    revision = (await client.state()).revision
    poll = asyncio.ensure_future(client.state(after=revision, wait_s=5.0))
    await asyncio.sleep(0.05)
    assert not poll.done()
    await client.post("stop")
    assert (await asyncio.wait_for(poll, 2.0)).stop_requested
    latest = (await client.state()).revision
    assert (await client.state(after=latest, wait_s=0.05)).revision == latest
    await client.close()


@pytest.mark.parametrize(
    ("path", "message", "error"),
    [
        ("weights/commit", None, "no publication was prepared"),
        ("trainer/step", {"batch": 1}, "trainer/step"),
        ("weights/join", group("engine-9").model_dump(), "no engine named engine-9"),
        ("nowhere", None, "HTTP 404"),
    ],
)
async def test_refusals_come_back_as_one_line(
    address: ControlAddress, path: str, message: object, error: str
) -> None:
    client = AsyncControlClient(address)
    with pytest.raises(ControlError, match=error):
        await client.post(path, message)
    await client.close()


async def test_a_wrong_token_is_refused(address: ControlAddress) -> None:
    client = AsyncControlClient(ControlAddress(address.url, "guess"))
    with pytest.raises(ControlError, match="control token"):
        await client.state()
    await client.close()


def test_a_coordinator_that_is_gone_is_named() -> None:
    with pytest.raises(ControlError, match=r"coordinator at http://127.0.0.1:9: no answer to state"):
        ControlClient(ControlAddress("http://127.0.0.1:9", TOKEN)).state()
