"""The trainer's side of publications against the real coordinator over HTTP; the rest is scripted.

The two engines have different numbers of ranks, so that the trainer brings every version, but where a test
says that they are alike: there one refills the other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from asyncrl.control.client import ControlAddress, ControlClient, ControlError
from asyncrl.control.messages import EngineLost, EngineStatus
from asyncrl.control.server import build_app, serve
from asyncrl.engines.scripted import ScriptedEngine
from asyncrl.trainer.publication import PolicyPublisher
from asyncrl.weights.publisher import EngineEndpoint, EngineFailure, PublishStats
from asyncrl.weights.wire import WeightUpdateError
from tests.unit.scripted_fleet import Fleet
from tests.unit.test_config import with_settings


class Transport:
    """Stands for `Publisher`: remembers whom it met and what it sent to whom."""

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy
        self.linked: tuple[str, ...] = ()
        self.links: list[int] = []  # their numbers
        self.connected: dict[str, EngineEndpoint] = {}
        self.sent: list[tuple[int, list[str]]] = []
        self.copied: list[int] = []  # versions that were sent from a copy
        self.sent_again: list[int] = []
        self.refuse_next = ""  # why the next meeting fails
        self.fail_next = ""  # the engine to which another rank cannot send the next version
        self.fail_here = ""  # the engine to which this rank cannot
        self.sending = threading.Event()  # clear: what is sent does not arrive yet
        self.sending.set()

    def connect(self, endpoint: EngineEndpoint) -> None:
        refusal, self.refuse_next = self.refuse_next, ""
        if refusal:
            raise WeightUpdateError(refusal)
        assert endpoint.name not in self.connected, "disconnect it first"
        self.connected[endpoint.name] = endpoint

    def disconnect(self, name: str) -> None:
        self.connected.pop(name, None)
        if name in self.linked:
            self.linked = ()

    def linkable(self) -> tuple[str, ...]:
        return tuple(sorted(self.connected)) if len(self.connected) > 1 else ()

    def link(self, engines: Sequence[str], number: int, strategy: str) -> None:
        assert strategy == self.strategy
        self.linked = tuple(engines)
        self.links.append(number)

    def plan_hash(self, name: str) -> str:
        return f"plan of {self.connected[name].group_name}"

    def manifest_hash(self, name: str) -> str:
        return f"manifest of {name}"

    def begin(
        self,
        endpoints: Sequence[EngineEndpoint],
        version: int,
        *,
        staged: bool,
        from_copy: bool,
        again: SendingNow | None,
    ) -> SendingNow:
        names = [endpoint.name for endpoint in endpoints]
        self.sent.append((version, names))
        together = set(self.linked) if set(self.linked) <= set(names) else set[str]()
        if again is not None:
            self.sent_again.append(version)
        if from_copy:
            self.copied.append(version)
        failed, self.fail_here = self.fail_here, ""
        failures = {failed: "it did not verify"} if failed else {}
        if failed in together:  # they fail together
            failures = dict.fromkeys(together, f"{failed} did not take its stripe")
        return SendingNow(self.sending, failures, together)

    def finish(self, sending: SendingNow, taken_by: Sequence[str]) -> PublishStats:
        failures = [EngineFailure(name, reason) for name, reason in sending.failures_here().items()]
        if self.fail_next:
            failures.append(EngineFailure(self.fail_next, "rank 1 could not send"))
            self.fail_next = ""
        for failure in failures:
            self.disconnect(failure.engine)
        return PublishStats(0.1, 0, 0, 0, tuple(failures))


@dataclass
class SendingNow:
    """Stands for `Sending`."""

    arrived: threading.Event
    failures: dict[str, str]
    together: set[str]

    def failures_here(self) -> dict[str, str]:
        assert self.arrived.wait(10.0), "nobody lets it arrive"
        return self.failures


class Job:
    """Two engines, a coordinator that listens, and the trainer's only rank."""

    def __init__(self, url: str, fleet: Fleet, **weights: Any) -> None:
        self.fleet, self.transport = fleet, Transport(weights.get("strategy", "p2p"))
        self.control = ControlClient(ControlAddress(url, "token"))
        config = with_settings(engine={"replicas": 2}, weights={"timeout_s": 5.0, **weights})
        self.publisher = PolicyPublisher(self.transport, self.control, config)  # type: ignore[arg-type]

    async def do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The trainer is another process; here it is another thread."""
        return await asyncio.to_thread(call, *arguments)

    async def start(self) -> None:
        for name in self.fleet.engines:
            await self.fleet.register(name)
        await self.do(self.publisher.connect_engines)
        await self.do(self.publisher.publish, 0)

    async def restart(self, name: str, engine: ScriptedEngine | None = None) -> None:
        self.fleet.engines[name].kill()
        await self.fleet.coordinator.engine_lost(EngineLost(name=name, incarnation=0, reason="killed"))
        self.fleet.replace(name, engine)
        await self.fleet.register(name, incarnation=1)

    def has_news(self) -> bool:
        return self.publisher.has_news(self.fleet.coordinator.state)

    def serving(self) -> dict[str, int]:
        engines = self.fleet.coordinator.state.engines
        return {e.name: e.policy_version for e in engines if e.status is EngineStatus.SERVING}


@pytest.fixture(params=["none", "device"])
async def job(request: pytest.FixtureRequest) -> AsyncIterator[Job]:
    async for job in started(stage=request.param):
        yield job


@pytest.fixture(params=["none", "host"])
async def overlapping(request: pytest.FixtureRequest) -> AsyncIterator[Job]:
    async for job in started(stage=request.param, overlap=True):
        yield job


async def started(*, alike: bool = False, **weights: Any) -> AsyncIterator[Job]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fleet = Fleet(2, alike=alike)
    runner, url = await serve(build_app(fleet.coordinator, "token"), "127.0.0.1", 0)
    yield Job(url, fleet, **weights)
    await runner.cleanup()
    dist.destroy_process_group()


async def test_a_quarantined_engine_is_met_again_and_takes_the_next_version(job: Job) -> None:
    await job.start()
    assert job.serving() == {"engine-0": 0, "engine-1": 0} and not job.has_news()
    group = job.transport.connected["engine-1"].group_name
    job.fleet.engines["engine-1"].fail_next("receive_weights", "digests differ")
    times = await job.do(job.publisher.publish, 1)
    assert set(times.paused_s) == {"engine-0"}
    assert job.serving() == {"engine-0": 1} and job.has_news()
    times = await job.do(job.publisher.publish, 2)
    assert job.serving() == {"engine-0": 2, "engine-1": 2} and not job.has_news()
    assert set(times.paused_s) == {"engine-0"}  # nobody waited for engine-1
    assert job.transport.connected["engine-1"].group_name != group
    assert job.fleet.engines["engine-1"].weight_groups == {job.transport.connected["engine-1"].group_name}
    both = ["engine-0", "engine-1"]
    assert job.transport.sent == [(0, both), (1, both), (2, both)]


async def test_an_engine_that_was_started_again_catches_up_alone(job: Job) -> None:
    await job.start()
    await job.do(job.publisher.publish, 1)
    await job.restart("engine-1")
    assert job.serving() == {"engine-0": 1} and job.has_news()
    await job.do(job.publisher.catch_up, 1)
    assert job.serving() == {"engine-0": 1, "engine-1": 1} and not job.has_news()
    assert job.transport.sent[-1] == (1, ["engine-1"])
    assert job.publisher.last_result is not None and job.publisher.last_result.committed[0] == "engine-0"
    assert job.fleet.coordinator.state.publications == 2
    await job.do(job.publisher.catch_up, 1)
    assert len(job.transport.sent) == 3  # there was nobody to bring anything to
    await job.do(job.publisher.publish, 2)
    assert job.serving() == {"engine-0": 2, "engine-1": 2}


async def test_an_engine_that_cannot_be_met_is_lost_in_the_end_and_training_goes_on(job: Job) -> None:
    await job.start()
    await job.restart("engine-1")
    attempts = 0
    while job.has_news():
        job.transport.refuse_next = "they did not meet"
        await job.do(job.publisher.catch_up, 0)
        attempts += 1
    lost = job.fleet.coordinator.state.engine("engine-1")
    assert attempts == 3 and lost.status is EngineStatus.LOST
    assert lost.reason == "they did not meet (3 failures in a row)"
    await job.do(job.publisher.publish, 1)
    assert job.serving() == {"engine-0": 1} and job.transport.connected.keys() == {"engine-0"}


async def test_an_engine_that_a_rank_could_not_reach_does_not_serve(job: Job) -> None:
    """It may have verified the version, but has no sender any more."""
    await job.start()
    job.transport.fail_next = "engine-1"
    await job.do(job.publisher.publish, 1)
    assert job.serving() == {"engine-0": 1}
    assert job.fleet.coordinator.state.engine("engine-1").reason == "rank 1 could not send"
    await job.do(job.publisher.catch_up, 1)
    assert job.serving() == {"engine-0": 1, "engine-1": 1}


async def test_an_engine_that_serves_another_model_ends_the_start(job: Job) -> None:
    for name in job.fleet.engines:
        await job.fleet.register(name)
    job.transport.refuse_next = "embed has 5 rows, its layout 7"
    with pytest.raises(ControlError, match="engine-0 cannot take the trainer's weights: embed has 5 rows"):
        await job.do(job.publisher.connect_engines)


async def test_the_last_engine_gone_is_an_error(job: Job) -> None:
    await job.start()
    for name in job.fleet.engines:
        job.fleet.engines[name].fail_next("receive_weights", "out of memory")
    with pytest.raises(ControlError, match=r"version 1 reached no engine: engine-0: .*out of memory"):
        await job.do(job.publisher.publish, 1)


async def test_an_engine_that_did_not_verify_what_was_sent_does_not_serve(job: Job) -> None:
    await job.start()
    job.transport.fail_here = "engine-0"
    times = await job.do(job.publisher.publish, 1)
    assert job.serving() == {"engine-1": 1} and set(times.paused_s) == {"engine-1"}
    assert job.fleet.coordinator.state.engine("engine-0").reason == "it did not verify"
    assert not await job.fleet.engines["engine-0"].ready()  # nobody samples from the old version
    await job.do(job.publisher.catch_up, 1)
    assert job.serving() == {"engine-0": 1, "engine-1": 1}


async def test_training_goes_on_while_a_version_is_sent(overlapping: Job) -> None:
    job = overlapping
    await job.start()
    await job.do(job.publisher.finish)
    job.transport.sending.clear()
    times = await job.do(job.publisher.publish, 1)
    assert times.num_bytes == 0 and times.paused_s == {}  # nothing ended in it
    staged = job.publisher._config.weights.stage != "none"
    assert job.serving() == ({"engine-0": 0, "engine-1": 0} if staged else {})
    job.transport.sending.set()
    await job.fleet.coordinator.wait_for_change(job.fleet.coordinator.state.revision, 1.0)
    while set(job.serving().values()) != {1} or len(job.serving()) < 2:  # though the trainer does not look
        await asyncio.sleep(0.01)
    times = await job.do(job.publisher.publish, 2)
    assert set(times.paused_s) == {"engine-0", "engine-1"}  # by version 1
    await job.do(job.publisher.finish)
    assert job.serving() == {"engine-0": 2, "engine-1": 2}
    assert job.transport.copied == [0, 1, 2]


async def test_an_engine_that_fails_while_training_goes_on_is_met_again(overlapping: Job) -> None:
    job = overlapping
    await job.start()
    await job.do(job.publisher.finish)
    job.fleet.engines["engine-1"].fail_next("receive_weights", "digests differ")
    await job.do(job.publisher.publish, 1)
    await job.do(job.publisher.publish, 2)
    await job.do(job.publisher.finish)
    assert job.serving() == {"engine-0": 2, "engine-1": 2}
    assert job.transport.sent[-1] == (2, ["engine-0", "engine-1"])


async def test_a_version_that_reached_nobody_ends_the_run_at_the_next_look(overlapping: Job) -> None:
    job = overlapping
    await job.start()
    await job.do(job.publisher.finish)
    for name in job.fleet.engines:
        job.fleet.engines[name].fail_next("receive_weights", "out of memory")
    await job.do(job.publisher.publish, 1)
    with pytest.raises(ControlError, match=r"version 1 reached no engine: engine-0: .*out of memory"):
        await job.do(job.publisher.publish, 2)


async def test_an_engine_that_will_not_stage_is_left_out() -> None:
    async for job in started(stage="device"):
        await job.start()
        job.fleet.engines["engine-0"].fail_next("stage_weights", "version 7 is still arriving")
        await job.do(job.publisher.publish, 1)
        assert job.transport.sent[-1] == (1, ["engine-1"])
        assert job.serving() == {"engine-1": 1}
        assert "still arriving" in job.fleet.coordinator.state.engine("engine-0").reason
