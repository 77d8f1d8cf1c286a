"""How the rollouter's service follows engines that are lost, quarantined, refilled and started again."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.config import load_config
from asyncrl.control.messages import EngineInfo, EngineStatus, RunState
from asyncrl.engines.base import INTERRUPTED, GenerateRequest, new_rid
from asyncrl.engines.scripted import ScriptedEngine
from asyncrl.rollout import service as service_module
from asyncrl.rollout.service import RolloutService
from tests.unit.source_tree import REPO

SERVING, QUARANTINED, LOST = EngineStatus.SERVING, EngineStatus.QUARANTINED, EngineStatus.LOST


class Rollouter:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.engines: dict[str, ScriptedEngine] = {}
        self.removed: list[tuple[str, str]] = []

    def add_engine(self, name: str, engine: ScriptedEngine) -> None:
        self.engines[name] = engine

    def uses_engine(self, name: str) -> bool:
        return name in self.engines

    def remove_engine(self, name: str, reason: str) -> None:
        self.engines.pop(name, None)
        self.removed.append((name, reason))


class Followed:
    """A service with a state that the test sets."""

    def __init__(self) -> None:
        config = load_config(REPO / "examples/tiny.toml", [f"model.path={REPO / 'examples/tiny-qwen3'}"])
        self.rollouter = Rollouter()
        self.service = RolloutService(config, None, lambda info: ScriptedEngine(info.url))  # type: ignore[arg-type]

    async def see(self, status: EngineStatus, version: int, incarnation: int = 0, reason: str = "") -> None:
        info = EngineInfo(
            name="e0",
            url=f"start {incarnation}",
            api_key="",
            tp=1,
            incarnation=incarnation,
            status=status,
            reason=reason,
        )
        self.service._state = RunState(engines=(info,), policy_version=version)
        await self.service._follow_engines(self.rollouter)  # type: ignore[arg-type]


async def test_an_engine_is_used_from_its_first_version_to_its_last() -> None:
    followed = Followed()
    await followed.see(EngineStatus.JOINING, -1)
    assert not followed.rollouter.engines
    await followed.see(SERVING, 0)
    first = followed.rollouter.engines["e0"]
    await followed.see(EngineStatus.PREPARED, 0)
    await followed.see(SERVING, 1)
    assert followed.rollouter.engines["e0"] is first and not followed.rollouter.removed
    await followed.see(LOST, 1, reason="killed")
    assert not followed.rollouter.engines and followed.rollouter.removed == [("e0", "killed")]


async def test_a_refilled_engine_and_a_later_start_are_used_again() -> None:
    followed = Followed()
    await followed.see(SERVING, 0)
    await followed.see(QUARANTINED, 1)
    await followed.see(SERVING, 1)  # refilled without a new version
    assert followed.rollouter.engines["e0"].name == "start 0"
    await followed.see(SERVING, 1, incarnation=1)  # its loss was missed between two polls
    assert followed.rollouter.engines["e0"].name == "start 1"
    assert followed.rollouter.removed[-1] == ("e0", "e0 was started again")


async def test_what_a_quarantined_engine_holds_goes_on_elsewhere() -> None:
    followed = Followed()
    await followed.see(SERVING, 0)
    engine = followed.rollouter.engines["e0"]
    await engine.pause("retract")
    held = asyncio.ensure_future(engine.generate(GenerateRequest(new_rid(), (1, 2), 5), 30.0))
    await asyncio.sleep(0)
    await followed.see(QUARANTINED, 1)
    assert (await asyncio.wait_for(held, 1.0)).finish == INTERRUPTED


async def test_an_engine_that_was_given_up_gets_another_chance_with_the_next_version() -> None:
    followed = Followed()
    await followed.see(SERVING, 0)
    followed.rollouter.engines.clear()  # it failed too often
    await followed.see(SERVING, 0)
    assert not followed.rollouter.engines
    await followed.see(SERVING, 1)
    assert followed.rollouter.uses_engine("e0")


async def test_an_engine_that_does_not_answer_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "RETIRE_TIMEOUT_S", 0.05)
    followed = Followed()
    await followed.see(SERVING, 0)

    async def never() -> None:
        await asyncio.sleep(60.0)

    monkeypatch.setattr(followed.rollouter.engines["e0"], "abort_all", never)
    await asyncio.wait_for(followed.see(LOST, 0), 2.0)
    assert not followed.rollouter.engines
