"""The display of a run: a live panel on a terminal, a line per phase and step elsewhere.

    run directory -> RunFollower -> render(view) or step_line / event_line

`step_line`, `event_line` and `render` are pure; `Progress` only decides when to print them.
"""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.observe.events import ENDS, Event
from asyncrl.observe.metrics import UNIX_TIME, StepMetrics
from asyncrl.observe.rundir import RunDir
from asyncrl.observe.view import RunFollower, RunView, duration, sparkline

Display = Literal["auto", "live", "plain"]
SPARK_WIDTH = 40
BAR_WIDTH = 12
END_STYLES = {"finished": "green", "stopped": "yellow", "failed": "red"}


def step_line(metrics: StepMetrics, total_steps: int) -> str:
    """One step in one line of plain text."""
    width = len(str(total_steps))
    return (
        f"step {metrics.step:>{width}}/{total_steps}"
        f"  reward {metrics.reward_mean:.3f}"
        f"  staleness {metrics.staleness_mean:.2f} (max {metrics.staleness_max})"
        f"  partial {metrics.partial_ratio:.0%}"
        f"  kl {metrics.mismatch_kl:.1e}"
        f"  {metrics.tokens_generated / max(metrics.time_step, 1e-9):.0f} tok/s"
        f"  idle trainer {metrics.trainer_idle_ratio:.0%} engine {metrics.engine_idle_ratio:.0%}"
        f"  {metrics.time_step:.1f} s (publish {metrics.time_publish:.2f})"
    )


def event_line(event: Event, started: float) -> str:
    """One event in one line of plain text, led by the seconds since ``started`` (unix time)."""
    fields = event.fields
    at = f"[{event.time - started:7.1f} s]"
    if event.kind == "phase":
        return f"{at} {fields['name']}"
    if event.kind == "heldout":
        tasks = f"{fields['num_tasks']} held-out tasks"
        return f"{at} {tasks}, {fields['label']}: {fields['accuracy']:.1%} right"
    if event.kind == "checkpoint":
        return f"{at} checkpoint of step {fields['step']} saved"
    if event.kind == "engine":
        return f"{at} {fields['message']}"
    if event.kind == "death":
        return f"{at} {fields['process']} died: {fields['reason']}"
    if event.kind in ENDS:
        return f"{at} {event.kind}" + (f": {fields['message']}" if fields.get("message") else "")
    return f"{at} {event.kind} " + " ".join(f"{key}={value}" for key, value in fields.items())


SILENT_KINDS = ("alarm", "publication", "verification")
"""Kinds too frequent for a line each; they stay in events.jsonl."""


def render(view: RunView, now: float) -> RenderableType:
    """The live panel; ``now`` in unix seconds."""
    parts: list[RenderableType] = []
    if view.last is None:
        parts.append(_phases(view, now))
    else:
        parts += [_progress_row(view), _reward_row(view), _gauges(view.last), _figures(view, view.last)]
    parts += _notes(view)
    return Panel(
        Group(*parts), title=f"asyncrl  {view.name}", title_align="left", box=box.ROUNDED, padding=(1, 2)
    )


def _phases(view: RunView, now: float) -> RenderableType:
    """The start-up phases with their durations, the current one still counting."""
    table = Table.grid(padding=(0, 2))
    phases = view.phases
    for phase, following in zip(phases, [*phases[1:], None], strict=True):
        seconds = (following.time if following else now) - phase.time
        mark = Text("✓", style="green") if following else Text("●", style="cyan")
        table.add_row(mark, str(phase.fields["name"]), Text(duration(max(0.0, seconds)), style="dim"))
    if not phases:
        table.add_row(Text("●", style="cyan"), "starting", "")
    return table


def _progress_row(view: RunView) -> RenderableType:
    assert view.last is not None
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(width=14)
    table.add_column(ratio=1)
    table.add_column(justify="right", min_width=18)
    left = view.seconds_left
    table.add_row(
        f"step {view.last.step}/{view.total_steps}",
        ProgressBar(view.total_steps, view.last.step),
        Text(f"{duration(left)} left" if left else "last step done", style="dim"),
    )
    return table


def _reward_row(view: RunView) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=14)
    rewards = view.rewards
    low, high = min(rewards), max(rewards)
    table.add_row(
        f"reward {rewards[-1]:.3f}",
        Text(sparkline(rewards, SPARK_WIDTH), style="green"),
        Text(f"{low:.3f} to {high:.3f}", style="dim"),
    )
    return table


def _gauges(last: StepMetrics) -> RenderableType:
    """How busy each side was in the last step."""
    table = Table.grid(padding=(0, 2))
    table.add_column(width=14)
    for name, idle, waiting in (
        ("trainer", last.trainer_idle_ratio, "waiting for samples"),
        ("engines", last.engine_idle_ratio, "nothing to generate"),
    ):
        busy = min(1.0, max(0.0, 1.0 - idle))
        bar = Text("█" * round(busy * BAR_WIDTH), style="cyan")
        bar.append("░" * (BAR_WIDTH - round(busy * BAR_WIDTH)), style="dim")
        table.add_row(name, bar, f"{busy:4.0%} busy", Text(f"{1 - busy:.0%} {waiting}", style="dim"))
    return table


def _figures(view: RunView, last: StepMetrics) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(width=14, style="dim")
        table.add_column(min_width=14)
    generated, trained = view.generated_per_second or 0.0, view.trained_per_second or 0.0
    rows = (
        ("staleness", f"{last.staleness_mean:.2f}, max {last.staleness_max}"),
        ("loss", f"{last.loss:+.4f}"),
        ("generated", f"{generated:.0f} tok/s"),
        ("partial", f"{last.partial_ratio:.0%} of samples"),
        ("gradient norm", f"{last.grad_norm:.3f}"),
        ("trained", f"{trained:.0f} tok/s"),
        ("mismatch KL", f"{last.mismatch_kl:.1e}"),
        ("ring", f"{last.ring_depth} samples"),
        ("publish", f"{last.time_publish:.2f} s"),
    )
    for first in range(0, len(rows), 3):
        table.add_row(*(cell for row in rows[first : first + 3] for cell in row))
    return table


def _notes(view: RunView) -> list[RenderableType]:
    """Held-out accuracies, the last phase while training, and how the run ended."""
    notes: list[RenderableType] = []
    if view.heldout:
        shown = [f"{event.fields['label']} {event.fields['accuracy']:.1%}" for event in view.heldout[-4:]]
        notes.append(Text("held-out accuracy  " + "  →  ".join(shown)))
    deaths = [event for event in view.events if event.kind == "death"]
    shown_events = [(event, "red") for event in deaths[-2:]]
    if view.end is not None:
        shown_events.append((view.end, END_STYLES[view.end.kind]))
    started = view.started or 0.0
    notes += [Text(event_line(event, started), style=style) for event, style in shown_events]
    return notes


class Progress:
    """Shows a run as it goes; call `update` about once a second. Used by one thread.

    with Progress(run, "auto", Console()) as progress: ... progress.update() ...
    """

    def __init__(self, run: RunDir, display: Display, console: Console) -> None:
        live = display == "live" or (display == "auto" and console.is_terminal)
        self._follower = RunFollower(run)
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if live else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.update()
        if self._live is not None:
            self._live.stop()

    @property
    def view(self) -> RunView:
        return self._follower.view

    def skip_history(self) -> None:
        """Take in what the run's earlier attempts did without showing it line by line."""
        self._follower.poll()

    def update(self) -> None:
        """Read what is new and show it."""
        events, steps = self._follower.poll()
        if self._live is not None:
            self._live.update(render(self.view, time.time()), refresh=True)
            return
        for line in plain_lines(self.view, events, steps):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def plain_lines(view: RunView, events: list[Event], steps: list[StepMetrics]) -> list[str]:
    """What one update prints without a terminal, in order of time; ``view`` has taken the news in."""
    started = view.started or 0.0
    lines = [(event.time, event_line(event, started)) for event in events if event.kind not in SILENT_KINDS]
    lines += [(step.extra.get(UNIX_TIME, math.inf), step_line(step, view.total_steps)) for step in steps]
    return [line for _, line in sorted(lines, key=lambda item: item[0])]
