"""What the displays know of a run: a fold over its events and metrics, and the figures derived from it.

    RunFollower.poll() -> new events and steps -> RunView.add_event / add_step -> figures

Everything is read from the run directory, so the process that trains, the one that displays and a second
terminal all see the same. No I/O in `RunView`.
"""

from __future__ import annotations

import statistics
import tomllib
from dataclasses import dataclass, field

from asyncrl.observe.events import ENDS, Event
from asyncrl.observe.jsonl import JsonlTail
from asyncrl.observe.metrics import StepMetrics
from asyncrl.observe.rundir import RunDir

SPARKS = "▁▂▃▄▅▆▇█"
RECENT_STEPS = 5
"""Rates and the time to finish are taken over so many steps."""


@dataclass
class RunView:
    """The state of one run as displayed; ``total_steps`` is the configured number."""

    name: str
    total_steps: int
    events: list[Event] = field(default_factory=list)
    steps: list[StepMetrics] = field(default_factory=list)

    def add_event(self, event: Event) -> None:
        self.events.append(event)

    def add_step(self, metrics: StepMetrics) -> None:
        """A resumed run may write steps again; what came after the new one is dropped."""
        while self.steps and self.steps[-1].step >= metrics.step:
            self.steps.pop()
        self.steps.append(metrics)

    @property
    def last(self) -> StepMetrics | None:
        return self.steps[-1] if self.steps else None

    @property
    def end(self) -> Event | None:
        """How the run ended, if it did and was not resumed since."""
        last = self.events[-1] if self.events else None
        return last if last is not None and last.kind in ENDS else None

    @property
    def attempt(self) -> list[Event]:
        """The events of the current attempt: those after the last end that others followed."""
        ends = [idx for idx, event in enumerate(self.events[:-1]) if event.kind in ENDS]
        return self.events[ends[-1] + 1 :] if ends else self.events

    @property
    def started(self) -> float | None:
        """Unix time of the attempt's first event."""
        return self.attempt[0].time if self.events else None

    @property
    def phases(self) -> list[Event]:
        return [event for event in self.attempt if event.kind == "phase"]

    @property
    def heldout(self) -> list[Event]:
        return [event for event in self.events if event.kind == "heldout"]

    @property
    def rewards(self) -> list[float]:
        return [step.reward_mean for step in self.steps]

    @property
    def seconds_per_step(self) -> float | None:
        recent = self.steps[-RECENT_STEPS:]
        return statistics.fmean(step.time_step for step in recent) if recent else None

    @property
    def seconds_left(self) -> float | None:
        """Time to the last step at the recent pace; None before the first step."""
        if self.last is None or self.seconds_per_step is None:
            return None
        return (self.total_steps - self.last.step) * self.seconds_per_step

    @property
    def generated_per_second(self) -> float | None:
        return self._rate([step.tokens_generated for step in self.steps[-RECENT_STEPS:]])

    @property
    def trained_per_second(self) -> float | None:
        return self._rate([step.tokens_trained for step in self.steps[-RECENT_STEPS:]])

    def _rate(self, tokens: list[int]) -> float | None:
        seconds = sum(step.time_step for step in self.steps[-RECENT_STEPS:])
        return sum(tokens) / seconds if seconds > 0 else None


class RunFollower:
    """Reads what a run appended since the last call, from its directory."""

    def __init__(self, run: RunDir) -> None:
        self._events = JsonlTail(run.events)
        self._metrics = JsonlTail(run.metrics)
        self.view = RunView(run.path.name, _total_steps(run))

    def poll(self) -> tuple[list[Event], list[StepMetrics]]:
        """The new events and steps, already added to `view`."""
        events = [Event.from_json(record) for record in self._events.poll()]
        steps = [StepMetrics.from_json(record) for record in self._metrics.poll()]
        for event in events:
            self.view.add_event(event)
        for step in steps:
            self.view.add_step(step)
        return events, steps


def _total_steps(run: RunDir) -> int:
    """The configured number of steps, read as text so that an old configuration still displays."""
    train = tomllib.loads(run.config.read_text())["train"]
    return int(train["steps"])


def sparkline(values: list[float], width: int) -> str:
    """``values`` as at most ``width`` blocks, scaled between their extremes; groups are averaged."""
    finite = [value for value in values if value == value]
    if not finite:
        return ""
    size = -(-len(finite) // width)
    points = [statistics.fmean(finite[start : start + size]) for start in range(0, len(finite), size)]
    low, high = min(points), max(points)
    if high == low:
        return SPARKS[3] * len(points)
    return "".join(SPARKS[round((value - low) / (high - low) * (len(SPARKS) - 1))] for value in points)


def duration(seconds: float) -> str:
    """``seconds`` for people: 8.2 s, 3 m 05 s, 1 h 02 m."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} m"
