"""Linked engines: the trainer's side against the real coordinator; what follows when a link fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from asyncrl.engines.base import EngineError, ReplicaLink
from asyncrl.engines.scripted import ScriptedEngine
from asyncrl.weights.groups import reach_store
from asyncrl.weights.routes import ready_key
from tests.unit.test_policy_publisher import Job, started

NAMES = ("engine-0", "engine-1")


class LinkingEngine(ScriptedEngine):
    """Its only rank joins every link at once, unless it is told not to."""

    joins = True

    async def link_replicas(self, group_name: str, link: ReplicaLink) -> None:
        await super().link_replicas(group_name, link)
        if self.joins:
            await asyncio.to_thread(self._tell, link)

    def _tell(self, link: ReplicaLink) -> None:
        store = reach_store(link.host, link.port, link.timeout_s)
        store.set(ready_key(link.name, link.replica, 0), "1")


@pytest.fixture(params=["none", "device"])
async def job(request: pytest.FixtureRequest) -> AsyncIterator[Job]:
    async for job in started(stage=request.param, strategy="relay", timeout_s=1.0):
        for name in NAMES:
            job.fleet.replace(name, LinkingEngine(name))
        yield job


def links_of(job: Job, name: str) -> list[tuple[int, int]]:
    """(number, replica) of every link that an engine was told to join."""
    return [(link.number, link.replica) for link in job.fleet.engines[name].links]


async def test_engines_are_linked_when_they_are_met(job: Job) -> None:
    await job.start()
    assert job.transport.linked == NAMES and job.transport.links == [1]
    assert links_of(job, "engine-0") == [(1, 0)] and links_of(job, "engine-1") == [(1, 1)]
    await job.do(job.publisher.publish, 1)
    assert job.transport.links == [1] and job.serving() == dict.fromkeys(NAMES, 1)


async def test_an_engine_that_was_started_again_is_linked_anew(job: Job) -> None:
    await job.start()
    await job.restart("engine-0", LinkingEngine("engine-0"))
    await job.do(job.publisher.publish, 1)
    assert job.transport.links == [1, 2] and job.transport.linked == NAMES
    assert links_of(job, "engine-1") == [(1, 1), (2, 1)] and links_of(job, "engine-0") == [(2, 0)]


async def test_a_link_that_fails_with_a_version_is_given_up_and_the_version_sent_one_by_one(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    await job.start()
    job.transport.fail_here = "engine-1"
    await job.do(job.publisher.publish, 1)
    assert job.serving() == dict.fromkeys(NAMES, 1)  # within the same publication
    assert job.transport.sent_again == [1] and job.transport.linked == ()
    assert "engine-1 did not take its stripe" in caplog.text
    await job.do(job.publisher.publish, 2)
    assert job.transport.links == [1]  # not tried again ..
    await job.restart("engine-1", LinkingEngine("engine-1"))
    await job.do(job.publisher.publish, 3)
    assert job.transport.links == [1, 2]  # .. until one of them is another


async def test_a_link_that_a_rank_does_not_join_is_named_and_given_up(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    engine = job.fleet.engines["engine-1"]
    assert isinstance(engine, LinkingEngine)
    engine.joins = False
    await job.start()
    assert "rank 0 of engine-1 did not join within 1 s" in caplog.text
    assert job.transport.linked == () and job.serving() == dict.fromkeys(NAMES, 0)


async def test_an_engine_that_refuses_to_be_linked_is_named(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(group_name: str, link: ReplicaLink) -> None:
        raise EngineError("engine engine-0 has other things to do")

    monkeypatch.setattr(job.fleet.engines["engine-0"], "link_replicas", refuse)
    await job.start()
    assert "engine engine-0 has other things to do" in caplog.text
    assert job.transport.linked == () and job.serving() == dict.fromkeys(NAMES, 0)


async def test_a_link_that_only_its_engines_saw_fail_is_given_up_too(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    await job.start()
    for name in NAMES:  # the trainer has sent all that they miss
        job.fleet.engines[name].fail_next("receive_weights", "lacks what engine-9 had to pass on")
    await job.do(job.publisher.publish, 1)
    assert job.serving() == dict.fromkeys(NAMES, 1)
    assert job.transport.sent_again == [1] and job.transport.linked == ()
    assert "lacks what engine-9 had to pass on" in caplog.text


async def test_a_linked_engine_that_fails_alone_is_not_linked_again(job: Job) -> None:
    await job.start()
    job.fleet.engines["engine-1"].fail_next("receive_weights", "did not verify its stripe")
    await job.do(job.publisher.publish, 1)
    assert job.serving()["engine-0"] == 1 and job.transport.sent_again == []
    await job.do(job.publisher.publish, 2)
    assert job.serving() == dict.fromkeys(NAMES, 2) and job.transport.links == [1]
