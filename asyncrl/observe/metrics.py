"""metrics.jsonl: one JSON object per training step, and the same numbers for TensorBoard.

    StepMetrics <-> {"step": 3, "reward/mean": 0.41, ..., "any/extra": 1.0}

The keys are a contract: they never change meaning. `ALIASES` gives the names that users of other trainers
look for. After a resume a step may be written again; the last line of a step counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from asyncrl.observe.jsonl import JsonlTail, append_line
from asyncrl.observe.rundir import RunDir
from asyncrl.observe.tensorboard import TensorBoardWriter

UNIX_TIME = "time/unix"
"""Extra key that the writer adds: when the step ended, in unix seconds."""


def _key(name: str) -> Any:
    return field(metadata={"key": name})


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one step did. Times are seconds, ratios are in [0, 1], token counts are of this step."""

    step: int = _key("step")  # from 1 on
    policy_version: int = _key("policy_version")  # that the step made
    reward_mean: float = _key("reward/mean")
    loss: float = _key("loss")
    grad_norm: float = _key("grad_norm")
    staleness_mean: float = _key("staleness/mean")  # versions, of the oldest token, over samples
    staleness_max: int = _key("staleness/max")
    partial_ratio: float = _key("partial/ratio")  # share of samples of more than one version
    partial_max_span: int = _key("partial/max_span")  # newest - oldest version within a sample
    mismatch_kl: float = _key("mismatch/kl")  # nats per token, behaviour || proximal
    tokens_trained: int = _key("tokens/trained")
    tokens_generated: int = _key("tokens/generated")
    time_step: float = _key("time/step")
    time_publish: float = _key("time/publish")
    time_engine_paused: float = _key("time/engine_paused")
    trainer_idle_ratio: float = _key("trainer/idle_ratio")  # waiting for samples
    engine_idle_ratio: float = _key("engine/idle_ratio")  # nothing to generate
    ring_depth: int = _key("ring/depth")  # samples waiting, over replicas
    extra: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, float]:
        """Raises:
        ValueError: an extra key is one of the contract's.
        """
        named = {key: getattr(self, name) for name, key in KEYS.items()}
        clash = named.keys() & self.extra.keys()
        if clash:
            raise ValueError(f"extra metric {', '.join(sorted(clash))} is a key of its own")
        return {**named, **self.extra}

    @classmethod
    def from_json(cls, record: Mapping[str, float | None]) -> StepMetrics:
        """Null reads as nan. Raises `KeyError` where a key of the contract is missing."""
        values = {key: math.nan if value is None else value for key, value in record.items()}
        extra = {key: value for key, value in values.items() if key not in _NAMES}
        return cls(**{name: values[key] for name, key in KEYS.items()}, extra=extra)  # type: ignore[arg-type]


KEYS: dict[str, str] = {f.name: f.metadata["key"] for f in fields(StepMetrics) if "key" in f.metadata}
"""Field name -> key in metrics.jsonl."""

_NAMES = frozenset(KEYS.values())


@dataclass(frozen=True, slots=True)
class Alias:
    """The nearest metric of another trainer; None where it has none."""

    verl: str | None = None
    slime: str | None = None
    trl: str | None = None


ALIASES: dict[str, Alias] = {
    "step": Alias("training/global_step", "train/step", "step"),
    "policy_version": Alias("fully_async/count/current_param_version", None, None),
    "reward/mean": Alias("critic/score/mean", "rollout/raw_reward", "reward"),
    "loss": Alias("actor/pg_loss", "train/loss", "loss"),
    "grad_norm": Alias("actor/grad_norm", "train/grad_norm", "grad_norm"),
    "partial/ratio": Alias("fully_async/partial/partial_ratio", None, None),
    "partial/max_span": Alias("fully_async/partial/max_partial_span", None, None),
    "mismatch/kl": Alias(
        "rollout_corr/k3_kl", "train/train_rollout_kl", "sampling/sampling_logp_difference/mean"
    ),
    "tokens/trained": Alias("perf/total_num_tokens", None, "num_tokens"),
    "time/step": Alias("timing_s/step", "perf/step_time", "step_time"),
    "time/publish": Alias("timing_s/param_sync", "perf/update_weights_time", None),
    "trainer/idle_ratio": Alias("fully_async/trainer/idle_ratio", "perf/wait_time_ratio", None),
    "engine/idle_ratio": Alias("fully_async/rollouter/idle_ratio", None, None),
}


class MetricsWriter:
    """Writes the metrics of a run; one writer per attempt, used by one thread."""

    def __init__(self, run_dir: Path, *, tensorboard: bool) -> None:
        self._run = RunDir(run_dir)
        self._tensorboard = TensorBoardWriter(self._run.tensorboard) if tensorboard else None

    def write(self, metrics: StepMetrics) -> None:
        """Append one step; it is on disk for readers when this returns."""
        record = {**metrics.to_json(), UNIX_TIME: time.time()}
        append_line(self._run.metrics, record)
        if self._tensorboard is not None:
            scalars = {key: value for key, value in record.items() if key not in ("step", UNIX_TIME)}
            self._tensorboard.write(metrics.step, scalars)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_metrics(run: RunDir) -> list[StepMetrics]:
    """The last line of every step, in step order."""
    last: dict[int, StepMetrics] = {}
    for record in JsonlTail(run.metrics).poll():
        metrics = StepMetrics.from_json(record)
        last[metrics.step] = metrics
    return [last[step] for step in sorted(last)]
