"""The timeline of a run as SVG: what the trainer and the engines did at the same time.

    each step's end and durations -> spans in two lanes -> rectangles

A step of the trainer is: wait for samples, train, publish. The engines generate all the time but for the
pause of a publication. The spans are laid out from what each step measured of itself, so gaps between
steps (a checkpoint, an evaluation) stay visible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from asyncrl.observe.charts import ticks
from asyncrl.observe.metrics import UNIX_TIME, StepMetrics
from asyncrl.observe.view import duration

WIDTH = 960
LEFT, RIGHT = 70, 12
LANE_HEIGHT, LANE_GAP, TOP = 30, 12, 8
LANES = ("trainer", "engines")
MAX_STEPS = 30
"""The timeline shows this many of the last steps."""

Activity = Literal["wait", "train", "publish", "generate", "pause"]


@dataclass(frozen=True, slots=True)
class Span:
    """One rectangle; times in unix seconds."""

    lane: str
    activity: Activity
    step: int
    start: float
    end: float


def step_spans(metrics: StepMetrics) -> list[Span]:
    """What one step consisted of. The pause of the engines lies at the end of the publication."""
    end = metrics.extra[UNIX_TIME]
    start = end - metrics.time_step
    waited = start + metrics.trainer_idle_ratio * metrics.time_step
    publishing = max(waited, end - metrics.time_publish)
    paused = end - min(metrics.time_engine_paused, metrics.time_step)
    spans = [
        Span("trainer", "wait", metrics.step, start, waited),
        Span("trainer", "train", metrics.step, waited, publishing),
        Span("trainer", "publish", metrics.step, publishing, end),
        Span("engines", "generate", metrics.step, start, paused),
        Span("engines", "pause", metrics.step, paused, end),
    ]
    return [span for span in spans if span.end > span.start]


def timeline(steps: Sequence[StepMetrics]) -> str:
    """An SVG of the last `MAX_STEPS` steps; empty where no step tells its time."""
    timed = [step for step in steps if UNIX_TIME in step.extra][-MAX_STEPS:]
    spans = [span for step in timed for span in step_spans(step)]
    if not spans:
        return ""
    origin, last = min(span.start for span in spans), max(span.end for span in spans)
    scale = (WIDTH - LEFT - RIGHT) / (last - origin)
    bottom = TOP + len(LANES) * (LANE_HEIGHT + LANE_GAP)
    body = [
        *_axis(last - origin, scale, bottom),
        *_lane_names(),
        *(_rectangle(span, origin, scale) for span in spans),
    ]
    height = bottom + 26
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="timeline">{"".join(body)}</svg>'


def _rectangle(span: Span, origin: float, scale: float) -> str:
    x, width = LEFT + (span.start - origin) * scale, (span.end - span.start) * scale
    y = TOP + LANES.index(span.lane) * (LANE_HEIGHT + LANE_GAP)
    text = escape(f"step {span.step}: {span.activity}, {duration(span.end - span.start)}")
    return (
        f'<rect class="{span.activity}" x="{x:.2f}" y="{y}" width="{max(0.4, width - 0.4):.2f}"'
        f' height="{LANE_HEIGHT}"><title>{text}</title></rect>'
    )


def _lane_names() -> Iterator[str]:
    for idx, lane in enumerate(LANES):
        y = TOP + idx * (LANE_HEIGHT + LANE_GAP) + LANE_HEIGHT / 2 + 4
        yield f'<text class="label" x="{LEFT - 10}" y="{y}" text-anchor="end">{lane}</text>'


def _axis(seconds: float, scale: float, bottom: float) -> Iterator[str]:
    for mark in ticks(0, seconds, 8):
        if mark > seconds:
            break
        x = LEFT + mark * scale
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{bottom}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{mark:g} s</text>'
