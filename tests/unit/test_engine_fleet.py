"""Which deaths of engines a run survives, and which cause it names when it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.control.messages import EngineInfo, EngineLost, EngineStatus, RunState
from asyncrl.launch import engines as engines_module
from asyncrl.launch.engines import EngineFleet
from asyncrl.launch.watch import Death, Watched
from tests.unit.test_config import with_settings

KILLED = 9
SERVING, LOST, JOINING = EngineStatus.SERVING, EngineStatus.LOST, EngineStatus.JOINING


class Control:
    """Stands for the coordinator: marks what is reported lost."""

    def __init__(self, *statuses: EngineStatus) -> None:
        infos = [
            EngineInfo(name=f"engine-{i}", url="", api_key="", tp=1, status=s) for i, s in enumerate(statuses)
        ]
        self.infos = {info.name: info for info in infos}
        self.lost: list[EngineLost] = []

    def post(self, path: str, message: Any) -> None:
        assert path == "engines/lost"
        self.lost.append(message)
        self.set(message.name, status=LOST, reason=message.reason)

    def set(self, name: str, **changes: Any) -> None:
        self.infos[name] = self.infos[name].model_copy(update=changes)

    def state(self) -> RunState:
        return RunState(engines=tuple(self.infos.values()))


class Launcher:
    """A fleet whose actors are their (engine, incarnation)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, control: Control, max_restarts: int = 2) -> None:
        self.killed: list[object] = []
        self.said: list[str] = []
        self.control = control
        monkeypatch.setattr(engines_module.ray, "kill", self.killed.append)
        config: Config = with_settings(engine={"replicas": len(control.infos), "max_restarts": max_restarts})
        self.fleet = EngineFleet(config, lambda idx, incarnation: (idx, incarnation), self.said.append)

    def follow(self, *deaths: Death) -> str | None:
        down = self.fleet.follow(self.control, list(deaths), self.control.state())  # type: ignore[arg-type]
        return down.describe() if down is not None else None


def death(engine_idx: int, incarnation: int = 0, label: str = "scheduler", pid: int = 7) -> Death:
    name = f"engine-{engine_idx}"
    return Death(Watched(f"{name} {label}", pid, Path("/nowhere"), name, incarnation), KILLED)


def test_one_of_two_is_told_to_the_coordinator_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Launcher(monkeypatch, Control(SERVING, SERVING))
    assert run.follow() is None and not run.killed
    assert run.follow(death(1), death(1, label="server")) is None  # the second is a consequence
    [lost] = run.control.lost
    assert (lost.name, lost.incarnation) == ("engine-1", 0) and "killed by SIGKILL" in lost.reason
    assert run.killed == [(1, 0)] and run.fleet.actors == [(0, 0), (1, 1)]
    assert run.follow(death(1, label="owner")) is None  # of the old incarnation, which was ended
    assert run.follow() is None and len(run.killed) == 1
    run.control.set("engine-1", status=SERVING, incarnation=1, policy_version=4)
    assert run.follow() is None
    assert run.said[-1] == "engine-1 serves again, version 4"
    assert run.follow(death(1, incarnation=1)) is None
    assert run.fleet.actors == [(0, 0), (1, 2)]


def test_the_last_that_serves_ends_the_run_with_the_first_that_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Launcher(monkeypatch, Control(SERVING, SERVING))
    assert run.follow(death(1, pid=11)) is None
    run.control.set("engine-1", status=JOINING, incarnation=1)  # up, but not yet with a version
    cause = run.follow(death(0, pid=10))
    assert cause is not None and cause.startswith("engine-1 scheduler (pid 11) died first: killed by SIGKILL")


def test_one_that_waits_for_a_refill_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    for joined in (True, False):  # for the next version; to be refilled
        run = Launcher(monkeypatch, Control(SERVING, SERVING))
        assert run.follow(death(1, pid=11)) is None
        run.control.set("engine-1", status=EngineStatus.PREPARED, incarnation=1, joined=joined)
        assert (run.follow(death(0, pid=10)) is None) == joined


def test_one_that_is_back_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Launcher(monkeypatch, Control(SERVING, SERVING), max_restarts=1)
    assert run.follow(death(1, pid=11)) is None
    run.control.set("engine-1", status=SERVING, incarnation=1)
    assert run.follow() is None
    assert run.follow(death(0, pid=10)) is None
    cause = run.follow(death(1, incarnation=1, pid=12))
    assert cause is not None and "(pid 10)" in cause


def test_restarts_are_counted_and_the_run_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Launcher(monkeypatch, Control(SERVING, SERVING, SERVING), max_restarts=0)
    assert run.follow(death(2)) is None
    assert run.fleet.actors == [(0, 0), (1, 0), (2, 0)] and run.killed == [(2, 0)]
    assert "engine-2 is not started again (engine.max_restarts = 0)" in run.said[-1]
    assert run.follow(death(1)) is None
    assert run.follow(death(0, pid=10)) is not None


def test_an_engine_that_lives_but_fails_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Launcher(monkeypatch, Control(SERVING, SERVING))
    run.control.set("engine-0", status=LOST, reason="out of memory (3 failures in a row)")
    assert run.follow() is None
    assert run.killed == [(0, 0)] and run.fleet.actors == [(0, 1), (1, 0)]
    assert run.follow() is None and len(run.killed) == 1


def test_a_death_at_start_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Launcher(monkeypatch, Control(JOINING, JOINING))
    assert run.follow(death(1)) is not None


def test_the_cause_of_a_failure_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Launcher(monkeypatch, Control(SERVING, SERVING))
    one, both = [death(0)], [death(0, pid=10), death(1)]
    assert run.fleet.cause(one, run.control.state()) is None  # another engine serves: it is not the cause
    down = Launcher(monkeypatch, Control(SERVING, SERVING)).fleet.cause(both, run.control.state())
    assert down is not None and "(pid 10)" in down.describe()
