"""`asyncrl show RUN --step N`: the samples that a step trained on, as the model saw and wrote them.

Reads rollouts/step_N.jsonl; one record per sample, grouped by prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from asyncrl.observe.jsonl import JsonlTail
from asyncrl.observe.rundir import RunDir, RunDirError, open_run


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One line of rollouts/step_N.jsonl; ``spans`` are (policy version, tokens) in order."""

    group_id: int
    sample_idx: int
    prompt: str
    completion: str
    reward: float
    reward_parts: Mapping[str, float]
    finish_reason: str
    num_new_tokens: int
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> SampleRecord:
        return cls(
            group_id=record["group_id"],
            sample_idx=record["sample_idx"],
            prompt=record["prompt"],
            completion=record["completion"],
            reward=record["reward"],
            reward_parts=record["reward_parts"],
            finish_reason=record["finish_reason"],
            num_new_tokens=record["num_new_tokens"],
            spans=tuple((span["policy_version"], span["num_tokens"]) for span in record["spans"]),
        )


def read_samples(run: RunDir, step: int) -> list[SampleRecord]:
    """The samples of ``step``, by group and sample.

    Raises:
        RunDirError: nothing was written for that step; names the steps there are.
    """
    file = run.rollout_file(step)
    if not file.is_file():
        steps = recorded_steps(run)
        have = f"steps {steps[0]} to {steps[-1]} are there" if steps else "no step has been recorded yet"
        raise RunDirError(f"{run.path}: no samples of step {step}; {have}")
    records = [SampleRecord.from_json(line) for line in JsonlTail(file).poll()]
    return sorted(records, key=lambda record: (record.group_id, record.sample_idx))


def recorded_steps(run: RunDir) -> list[int]:
    return sorted(int(file.stem.removeprefix("step_")) for file in run.rollouts.glob("step_*.jsonl"))


def show(run_path: Path, step: int, console: Console, *, max_groups: int = 4) -> None:
    """Print up to ``max_groups`` sample groups of a step.

    Raises:
        RunDirError: no such run or step.
    """
    samples = read_samples(open_run(run_path), step)
    groups = [list(group) for _, group in itertools.groupby(samples, key=lambda sample: sample.group_id)]
    for group in groups[:max_groups]:
        console.print(render_group(group))
    if len(groups) > max_groups:
        console.print(
            f"{len(groups) - max_groups} more groups of step {step} (--groups to see more)",
            style="dim",
            highlight=False,
        )


def render_group(samples: Sequence[SampleRecord]) -> RenderableType:
    """A prompt once, then each sample's completion, reward and versions."""
    rewards = [sample.reward for sample in samples]
    title = f"group {samples[0].group_id}   mean reward {sum(rewards) / len(rewards):.3f}"
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim")
    table.add_column(justify="right")
    table.add_column(ratio=1, overflow="fold")
    for sample in samples:
        style = "green" if sample.reward == max(rewards) and min(rewards) < max(rewards) else ""
        text = Text(sample.completion or "(empty)")
        text.append(f"\n{describe(sample)}", style="dim")
        table.add_row(f"#{sample.sample_idx}", Text(f"{sample.reward:g}", style=style), text)
    return Group(
        Rule(Text(title), align="left"),
        Padding(Text(samples[0].prompt.rstrip(), style="cyan"), (0, 0, 1, 4)),
        table,
        Text(),
    )


def describe(sample: SampleRecord) -> str:
    """Length, ending, reward parts, and which policy version wrote which tokens."""
    parts = "".join(f", {name} {value:g}" for name, value in sample.reward_parts.items())
    spans = ", ".join(f"{count} by version {version}" for version, count in sample.spans)
    return f"{sample.num_new_tokens} tokens ({spans}), ended by {sample.finish_reason}{parts}"
