"""Line charts as SVG text: pure functions from numbers to markup, coloured by the page's style sheet.

Nothing here names a colour: elements carry classes (``grid``, ``tick``, ``label``, ``line``, ``dot``, ``s1``
to ``s4``) that the page styles, so light and dark follow the reader's setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 30, 36
TARGET_TICKS = 4


@dataclass(frozen=True, slots=True)
class Series:
    """One line; ``values`` go with the chart's steps, and nan leaves a gap."""

    name: str
    values: Sequence[float]
    color: int  # 1 to 4
    faint: bool = False  # drawn thin and pale, as the raw data behind a smoothed line
    stepped: bool = False  # for whole numbers


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear scale: data from ``low`` to ``high`` onto pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, target: int = TARGET_TICKS) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that enclose ``low`` and ``high``."""
    if not high > low:
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / target
    power = 10.0 ** math.floor(math.log10(raw))
    spacing = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / spacing + 1e-9), math.ceil(high / spacing - 1e-9)
    return [index * spacing for index in range(first, last + 1)]


def line_chart(
    steps: Sequence[int],
    series: Sequence[Series],
    *,
    y_label: str,
    percent: bool = False,
    y_range: tuple[float, float] | None = None,
) -> str:
    """An SVG of lines over training steps, with labelled axes and a legend where there is more than one.

    ``y_range`` is the least that the vertical axis covers; ``percent`` labels shares as percentages.
    """
    values = [value for line in series for value in line.values if math.isfinite(value)]
    values += list(y_range or ())
    marks = ticks(min(values, default=0.0), max(values, default=1.0))
    x_axis = Axis(steps[0], max(steps[-1], steps[0] + 1), LEFT, WIDTH - RIGHT)
    y_axis = Axis(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    body = [
        *_grid(marks, y_axis, percent),
        *_step_labels(steps, x_axis),
        f'<text class="label" x="{LEFT}" y="12">{escape(y_label)}</text>',
        *(_line(steps, line, x_axis, y_axis) for line in series),
        *_end_dots(steps, series, x_axis, y_axis),
        *_legend(series),
        *_hover(steps, series, x_axis, percent),
    ]
    title = escape(f"{y_label} over training steps")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{"".join(body)}</svg>'


def _grid(marks: Sequence[float], axis: Axis, percent: bool) -> Iterator[str]:
    for mark in marks:
        y = axis.at(mark)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        text = number(mark, percent)
        yield f'<text class="tick" x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>'


def _step_labels(steps: Sequence[int], axis: Axis) -> Iterator[str]:
    y = HEIGHT - BOTTOM + 15
    inner = [int(mark) for mark in ticks(steps[0], steps[-1], 6) if mark == int(mark)]
    for step in [mark for mark in inner if steps[0] <= mark <= steps[-1]] or [steps[0]]:
        yield f'<text class="tick" x="{axis.at(step):.1f}" y="{y}" text-anchor="middle">{step}</text>'
    yield f'<text class="label" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step</text>'


def _line(steps: Sequence[int], line: Series, x_axis: Axis, y_axis: Axis) -> str:
    commands: list[str] = []
    previous_y: float | None = None
    for step, value in zip(steps, line.values, strict=True):
        if not math.isfinite(value):
            previous_y = None
            continue
        x, y = x_axis.at(step), y_axis.at(value)
        if previous_y is not None and line.stepped:
            commands.append(f"L{x:.1f} {previous_y:.1f}")
        commands.append(f"{'M' if previous_y is None else 'L'}{x:.1f} {y:.1f}")
        previous_y = y
    style = f"line s{line.color}" + (" raw" if line.faint else "")
    return f'<path class="{style}" d="{"".join(commands)}"/>'


def _end_dots(steps: Sequence[int], series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    for line in series:
        if not line.faint and math.isfinite(line.values[-1]):
            x, y = x_axis.at(steps[-1]), y_axis.at(line.values[-1])
            yield f'<circle class="dot s{line.color}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _legend(series: Sequence[Series]) -> Iterator[str]:
    """Names at the upper right, laid out from the right edge."""
    if len(series) < 2:
        return
    x = float(WIDTH - RIGHT)
    for line in reversed(series):
        style = f"line s{line.color}" + (" raw" if line.faint else "")
        yield f'<text class="tick" x="{x:.0f}" y="12" text-anchor="end">{escape(line.name)}</text>'
        x -= 6.0 * len(line.name) + 12
        yield f'<path class="{style}" d="M{x - 14:.0f} 8.5h14"/>'
        x -= 28


def _hover(steps: Sequence[int], series: Sequence[Series], axis: Axis, percent: bool) -> Iterator[str]:
    """Invisible columns that show a step's values as the browser's own tooltip."""
    width = (WIDTH - LEFT - RIGHT) / max(1, len(steps) - 1)
    for idx, step in enumerate(steps):
        text = "\n".join(f"{line.name}: {number(line.values[idx], percent)}" for line in series)
        yield (
            f'<rect class="hover" x="{axis.at(step) - width / 2:.1f}" y="{TOP}" width="{width:.1f}"'
            f' height="{HEIGHT - TOP - BOTTOM}"><title>step {step}\n{escape(text)}</title></rect>'
        )


def number(value: float, percent: bool = False) -> str:
    """A short label: 80%, 1200, 0.25, 5e-04."""
    if not math.isfinite(value):
        return "none"
    if percent:
        return f"{value:.0%}"
    if value == 0 or 0.0001 <= abs(value) < 100_000:
        return f"{value:.4g}"
    return f"{value:.0e}"


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to ``window - 1`` before it; nan counts for nothing."""
    result = []
    for end in range(1, len(values) + 1):
        recent = [value for value in values[max(0, end - window) : end] if math.isfinite(value)]
        result.append(sum(recent) / len(recent) if recent else math.nan)
    return result
