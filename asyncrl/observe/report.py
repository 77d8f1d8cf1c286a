"""`report.html`: one file that tells the whole run, readable without a network.

    run directory -> ReportData (charts as SVG text, samples, figures) -> report.html.j2 -> report.html

The page holds its own style and drawings; it refers to nothing outside itself.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from asyncrl.observe.charts import Series, line_chart, smoothed
from asyncrl.observe.events import ENDS, Event, read_events
from asyncrl.observe.metrics import StepMetrics, read_metrics
from asyncrl.observe.progress import event_line
from asyncrl.observe.rundir import RunDir
from asyncrl.observe.show import SampleRecord, describe, read_samples, recorded_steps
from asyncrl.observe.summary import Summary, read_summary
from asyncrl.observe.timeline import MAX_STEPS, timeline
from asyncrl.observe.view import duration

TEMPLATE = "report.html.j2"
SMOOTHING_STEPS = 5
SAMPLE_GROUPS = 3
MAX_POINTS = 300
"""A curve of a longer run shows means over several steps."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    note: str  # one sentence: what a good curve looks like
    svg: Markup


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the heading."""

    value: str
    name: str


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One evaluation, ready to print; ``percent`` is the length of its bar."""

    label: str
    accuracy: str
    percent: float
    num_tasks: int


@dataclass(frozen=True, slots=True)
class SampleGroup:
    prompt: str
    samples: tuple[tuple[SampleRecord, str], ...]  # with the line that describes each


def write_report(run: RunDir) -> Path:
    """Write report.html from what the run has recorded, and return its path.

    Works while the run goes on, and for a run that failed before its first step.
    """
    steps = read_metrics(run)
    events = read_events(run)
    summary = read_summary(run) if run.summary.is_file() else None
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template(TEMPLATE).render(
        name=run.path.name,
        path=str(run.path),
        state=_state(events, summary),
        troubles=_troubles(events),
        figures=_figures(steps, summary),
        heldout=_heldout(events),
        charts=_charts(steps) if steps else [],
        timeline=Markup(timeline(steps)),
        timeline_steps=min(len(steps), MAX_STEPS),
        phases=_phases(events),
        sample_step=max(recorded_steps(run), default=None),
        groups=_groups(run),
        config=run.config.read_text(),
    )
    run.report.write_text(page, encoding="utf-8")
    return run.report


def _state(events: Sequence[Event], summary: Summary | None) -> str:
    """How the run stands: its last end, or what the summary's presence says."""
    if events and events[-1].kind in ENDS:
        return events[-1].kind
    return "finished" if summary is not None else "not finished: what has been recorded so far"


def _troubles(events: Sequence[Event]) -> list[str]:
    """What went wrong, in the words of the events."""
    started = events[0].time if events else 0.0
    return [event_line(event, started) for event in events if event.kind in ("death", "failed")]


def _figures(steps: Sequence[StepMetrics], summary: Summary | None) -> list[Figure]:
    if not steps:
        return [Figure("0", "steps")]
    generated = sum(step.tokens_generated for step in steps) / sum(step.time_step for step in steps)
    figures = [
        Figure(str(steps[-1].step), "steps"),
        Figure(f"{steps[-1].reward_mean:.2f}", "reward, last step"),
        Figure(str(max(step.staleness_max for step in steps)), "largest staleness"),
        Figure(f"{generated:.0f}", "tokens generated / s"),
    ]
    if summary is not None:
        figures += [
            Figure(duration(summary.seconds), "from start to end"),
            Figure(f"{summary.peak_rss_gib:.1f} GiB", "peak memory"),
            Figure(str(summary.publications), "publications"),
            Figure(f"{summary.samples_trained} / {summary.samples_issued}", "samples trained / issued"),
        ]
    return figures


def _heldout(events: Sequence[Event]) -> list[HeldOut]:
    return [
        HeldOut(
            label=event.fields["label"],
            accuracy=f"{event.fields['accuracy']:.1%}",
            percent=100 * event.fields["accuracy"],
            num_tasks=event.fields["num_tasks"],
        )
        for event in events
        if event.kind == "heldout"
    ]


def _charts(steps: Sequence[StepMetrics]) -> list[Chart]:
    points = _points(steps)
    numbers = [point[-1].step for point in points]

    def values(
        get: Callable[[StepMetrics], float], reduce: Callable[[list[float]], float] = statistics.fmean
    ) -> list[float]:
        return [reduce([get(step) for step in point]) for point in points]

    rewards = values(lambda s: s.reward_mean)
    raw = Series("per step", rewards, 1, faint=True)
    mean = Series(f"mean of {SMOOTHING_STEPS}", smoothed(rewards, SMOOTHING_STEPS), 1)
    staleness = [
        Series("mean", values(lambda s: s.staleness_mean), 2),
        Series("max", values(lambda s: s.staleness_max, max), 3, stepped=True),
    ]
    idle = [
        Series("trainer", values(lambda s: s.trainer_idle_ratio), 1),
        Series("engines", values(lambda s: s.engine_idle_ratio), 3),
    ]
    mismatch = [Series("KL", values(lambda s: s.mismatch_kl), 4)]
    rates = [
        Series("generated", values(lambda s: s.tokens_generated / max(s.time_step, 1e-9)), 3),
        Series("trained", values(lambda s: s.tokens_trained / max(s.time_step, 1e-9)), 1),
    ]
    partial = [Series("partial", values(lambda s: s.partial_ratio), 2)]
    return [
        Chart("Reward", "Mean reward of the samples that each step trained on.",
              _svg(numbers, [raw, mean], "reward")),
        Chart("Staleness", "Versions between a sample's oldest token and the trained policy.",
              _svg(numbers, staleness, "policy versions", y_range=(0, 1.5))),
        Chart("Idle shares", "Time in which a side had nothing to do; both low means neither waits.",
              _svg(numbers, idle, "share of the step", percent=True, y_range=(0, 0.5))),
        Chart("Mismatch", "KL divergence of the sampling policy from the training one.",
              _svg(numbers, mismatch, "nats per token", y_range=(0, 0))),
        Chart("Throughput", "Tokens sampled, and tokens trained on with their prompts.",
              _svg(numbers, rates, "tokens / s", y_range=(0, 0))),
        Chart("Partial rollouts", "Samples that a new policy version reached midway.",
              _svg(numbers, partial, "share of samples", percent=True, y_range=(0, 0.5))),
    ]  # fmt: skip


def _points(steps: Sequence[StepMetrics]) -> list[Sequence[StepMetrics]]:
    """The steps in at most `MAX_POINTS` runs of equal length, one for each point of a curve."""
    size = -(-len(steps) // MAX_POINTS)
    return [steps[first : first + size] for first in range(0, len(steps), size)]


def _svg(
    steps: Sequence[int],
    series: Sequence[Series],
    y_label: str,
    *,
    percent: bool = False,
    y_range: tuple[float, float] | None = None,
) -> Markup:
    return Markup(line_chart(steps, series, y_label=y_label, percent=percent, y_range=y_range))


def _phases(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Name and duration of the start-up phases, up to training; the last attempt's."""
    phases = [event for event in events if event.kind == "phase"]
    pairs = [(a.fields["name"], b.time - a.time) for a, b in itertools.pairwise(phases)]
    return [(name, duration(seconds)) for name, seconds in pairs if math.isfinite(seconds)]


def _groups(run: RunDir) -> list[SampleGroup]:
    """A few groups of the last recorded step, those with both right and wrong samples first."""
    steps = recorded_steps(run)
    if not steps:
        return []
    samples = read_samples(run, steps[-1])
    groups = [list(group) for _, group in itertools.groupby(samples, key=lambda sample: sample.group_id)]
    groups.sort(key=lambda group: len({sample.reward for sample in group}) == 1)
    return [
        SampleGroup(group[0].prompt.rstrip(), tuple((sample, describe(sample)) for sample in group))
        for group in groups[:SAMPLE_GROUPS]
    ]
