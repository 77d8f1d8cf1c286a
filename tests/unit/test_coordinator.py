"""What the coordinator records, and its control port over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from asyncrl.control.client import AsyncControlClient, ControlAddress, ControlClient, ControlError
from asyncrl.control.messages import (
    CheckpointDone,
    CommitOrder,
    Phase,
    ProcessInfo,
    StepDone,
    TrainerStart,
)
from asyncrl.control.protocol import Refused
from asyncrl.control.server import build_app, serve
from tests.pace import idle
from tests.unit.scripted_fleet import Fleet, join_order

TOKEN = "secret"


async def test_batches_are_reported_in_order() -> None:
    fleet = Fleet(0)
    await fleet.coordinator.trainer_started(TrainerStart(step=4, policy_version=4, rings=("r",)))
    await fleet.coordinator.step_done(StepDone(batch_idx=4))
    assert fleet.coordinator.state.batches_trained == 5
    with pytest.raises(Refused, match="expected batch 5"):
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
    await idle(0.05)
    assert not poll.done()
    await client.post("stop")
    assert (await asyncio.wait_for(poll, 2.0)).stop_requested
    latest = (await client.state()).revision
    assert (await client.state(after=latest, wait_s=0.05)).revision == latest
    await client.close()


@pytest.mark.parametrize(
    ("path", "message", "error"),
    [
        ("weights/commit", CommitOrder(version=1, epoch=0), "no publication was prepared"),
        ("trainer/step", {"batch": 1}, "trainer/step"),
        ("weights/join", join_order("engine-9"), "no engine named engine-9"),
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


async def test_a_client_that_was_closed_can_still_report(address: ControlAddress) -> None:
    """A part of the run closes its client when it ends, and its owner then reports why."""
    client = AsyncControlClient(address)
    await client.state()
    await client.close()
    await client.post("failure", "the reason")
    assert (await client.state()).failure == "the reason"
    await client.close()
