"""The engines of a run as their launcher sees them: started, watched, started again after a death.

    death of an engine's process, or LOST from the coordinator
        --> others serve:          tell the coordinator, end what is left of it, start the next incarnation
        --> nobody serves:         the run ends, with the first death of those that are down
        --> restarts are used up:  the run goes on with the others

Each incarnation is an actor of its own. With one replica nothing is started again: its death ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ray

from asyncrl.config import Config
from asyncrl.control.client import ControlClient
from asyncrl.control.messages import EngineInfo, EngineLost, EngineStatus, RunState
from asyncrl.launch.watch import Death

StartEngine = Callable[[int, int], object]
"""(engine index, incarnation) -> the actor that owns it."""


@dataclass(frozen=True)
class Down:
    """Why an engine does not serve, in one line, and the death, if a process died."""

    reason: str
    death: Death | None

    def describe(self) -> str:
        return self.death.describe() if self.death is not None else self.reason


@dataclass
class _Engine:
    actor: object
    incarnation: int = 0
    is_up: bool = True  # as far as is known; also while it starts


class EngineFleet:
    """Owns the engines' actors. Used by one thread.

    Args:
        on_change: told in one line what became of an engine.
    """

    def __init__(self, config: Config, start: StartEngine, on_change: Callable[[str], None]) -> None:
        self._max_restarts = config.engine.max_restarts
        self._start = start
        self._on_change = on_change
        self._engines = {engine_name(idx): _Engine(start(idx, 0)) for idx in range(config.engine.replicas)}
        self._down: dict[str, Down] = {}  # in the order in which they went down

    def follow(self, control: ControlClient, deaths: list[Death], state: RunState) -> Down | None:
        """Act on what happened to engines; returns the cause when the run cannot go on.

        Raises:
            ControlError: the coordinator does not answer.
        """
        for name in [name for name in self._down if self._is_back(state, name)]:
            del self._down[name]
            self._on_change(f"{name} serves again, version {state.engine(name).policy_version}")
        gone = self._take_down(deaths, state)
        if not gone:
            return None
        for name in gone:
            lost = EngineLost(
                name=name, incarnation=self._engines[name].incarnation, reason=self._down[name].reason
            )
            control.post("engines/lost", lost)
            self._on_change(self._down[name].reason)
        if not any(_serves(engine) for engine in control.state().engines):
            return next(iter(self._down.values()))
        for name in gone:
            self._restart(name)
        return None

    def cause(self, deaths: list[Death], state: RunState) -> Down | None:
        """The first engine that is down, where that left none that serves: the cause of other failures."""
        self._take_down(deaths, state)
        serving = [e.name for e in state.engines if _serves(e) and e.name not in self._down]
        return next(iter(self._down.values())) if self._down and not serving else None

    def _take_down(self, deaths: list[Death], state: RunState) -> list[str]:
        """Engines that went down since the last call; further deaths of the same incarnation are none."""
        causes: list[tuple[str, int, Down]] = [
            (death.process.engine, death.process.incarnation, Down(death.headline(), death))
            for death in deaths
        ]
        causes += [
            (info.name, info.incarnation, Down(f"{info.name}: {info.reason}", None))
            for info in state.engines
            if info.status is EngineStatus.LOST
        ]
        gone = []
        for name, incarnation, down in causes:
            engine = self._engines[name]
            if engine.is_up and engine.incarnation == incarnation:
                engine.is_up = False
                self._down[name] = down
                gone.append(name)
        return gone

    def _is_back(self, state: RunState, name: str) -> bool:
        engine = self._engines[name]
        info = _find(state, name)
        up = info is not None and info.status is EngineStatus.SERVING
        return engine.is_up and up and info is not None and info.incarnation == engine.incarnation

    def _restart(self, name: str) -> None:
        engine = self._engines[name]
        ray.kill(engine.actor)  # ends the whole tree below it
        if engine.incarnation >= self._max_restarts:
            self._on_change(
                f"{name} is not started again (engine.max_restarts = {self._max_restarts}); the run goes on"
            )
            return
        engine.incarnation += 1
        engine.actor = self._start(list(self._engines).index(name), engine.incarnation)
        engine.is_up = True
        self._on_change(f"{name} starts again ({engine.incarnation} of {self._max_restarts})")

    @property
    def actors(self) -> list[object]:
        return [engine.actor for engine in self._engines.values()]


def engine_name(engine_idx: int) -> str:
    return f"engine-{engine_idx}"


def engine_log(log_dir: Path, engine_idx: int) -> Path:
    """All incarnations append to it."""
    return log_dir / f"{engine_name(engine_idx)}.log"


def _serves(engine: EngineInfo) -> bool:
    """Or it will in a moment. One that has not joined is prepared for a refill, whose source may be gone."""
    return engine.status is EngineStatus.SERVING or (engine.status is EngineStatus.PREPARED and engine.joined)


def _find(state: RunState, name: str) -> EngineInfo | None:
    return next((engine for engine in state.engines if engine.name == name), None)
