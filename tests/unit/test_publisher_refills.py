"""The trainer's side of publications where the engines are alike: one has refilled the other meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from asyncrl.control.messages import EngineStatus
from tests.pace import idle
from tests.unit.test_policy_publisher import Job, started
from tests.unit.test_refill import Gate

BOTH = ["engine-0", "engine-1"]


@pytest.fixture(params=["none", "device"])
async def job(request: pytest.FixtureRequest) -> AsyncIterator[Job]:
    async for job in started(stage=request.param, alike=True):
        yield job


@pytest.fixture(params=["none", "host"])
async def overlapping(request: pytest.FixtureRequest) -> AsyncIterator[Job]:
    async for job in started(stage=request.param, overlap=True, alike=True):
        yield job


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_refilled_engine_is_met_before_the_next_publication(job: Job) -> None:
    await job.start()
    group = job.transport.connected["engine-1"].group_name
    await job.restart("engine-1")
    await until(lambda: job.serving() == {"engine-0": 0, "engine-1": 0})
    times = await job.do(job.publisher.publish, 1)
    assert job.serving() == {"engine-0": 1, "engine-1": 1} and not job.has_news()
    assert set(times.paused_s) == set(BOTH)
    assert job.transport.connected["engine-1"].group_name != group
    assert job.transport.sent == [(0, BOTH), (1, BOTH)]


async def test_a_refilled_engine_is_met_between_two_steps_and_sent_nothing(job: Job) -> None:
    await job.start()
    await job.restart("engine-1")
    await until(lambda: "engine-1" in job.serving())
    assert job.has_news()
    await job.do(job.publisher.catch_up, 0)
    assert not job.has_news() and job.fleet.coordinator.state.engine("engine-1").joined
    assert job.transport.sent == [(0, BOTH)]


async def test_an_engine_that_failed_is_refilled_and_met_again(job: Job) -> None:
    await job.start()
    job.fleet.engines["engine-1"].fail_next("receive_weights", "digests differ")
    await job.do(job.publisher.publish, 1)
    await until(lambda: job.serving() == {"engine-0": 1, "engine-1": 1})
    await job.do(job.publisher.publish, 2)
    assert job.serving() == {"engine-0": 2, "engine-1": 2}
    assert job.transport.sent == [(0, BOTH), (1, BOTH), (2, BOTH)]
    assert job.fleet.engines["engine-1"].weight_groups == {job.transport.connected["engine-1"].group_name}


async def test_a_publication_waits_for_a_refill_and_takes_the_engine_along(job: Job) -> None:
    await job.start()
    gate = Gate(job.fleet.replace("engine-1"), "take_weights")
    await job.fleet.register("engine-1", incarnation=1)
    await gate.entered.wait()
    assert not job.has_news()  # it is being refilled
    publishing = asyncio.ensure_future(job.do(job.publisher.publish, 1))
    await idle(0.2)
    assert not publishing.done() and job.serving() == {"engine-0": 0}
    gate.go.set()
    await publishing
    assert job.serving() == {"engine-0": 1, "engine-1": 1}


async def test_an_engine_that_cannot_be_met_ends_in_the_trainers_hands(job: Job) -> None:
    await job.start()
    await job.restart("engine-1")
    attempts = 0
    while job.fleet.status("engine-1") is not EngineStatus.LOST:
        await until(lambda: job.has_news() and job.fleet.coordinator._refills._task is None)
        job.transport.refuse_next = "they did not meet"
        await job.do(job.publisher.catch_up, 0)
        attempts += 1
        assert attempts < 5
    await job.do(job.publisher.publish, 1)
    assert job.serving() == {"engine-0": 1}


async def test_an_engine_that_comes_back_while_a_version_is_sent_waits_for_it(overlapping: Job) -> None:
    job = overlapping
    await job.start()
    await job.do(job.publisher.finish)
    job.transport.sending.clear()
    await job.do(job.publisher.publish, 1)
    await job.restart("engine-1")
    await idle(0.1)
    assert "engine-1" not in job.serving()
    job.transport.sending.set()
    await until(lambda: job.serving() == {"engine-0": 1, "engine-1": 1})
    await job.do(job.publisher.publish, 2)
    await job.do(job.publisher.finish)
    assert job.serving() == {"engine-0": 2, "engine-1": 2}
    assert job.transport.sent == [(0, BOTH), (1, BOTH), (2, BOTH)]
