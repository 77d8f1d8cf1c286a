"""One line of metrics.jsonl per step, written by rank 0.

The trainer knows most of it; what the rollouter did meanwhile comes as running totals, of which a step is
the difference to the step before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from asyncrl.algo.metrics import alarms
from asyncrl.control.messages import RolloutReport
from asyncrl.observe.events import EventLog
from asyncrl.observe.metrics import MetricsWriter, StepMetrics
from asyncrl.trainer.batch import BatchStats
from asyncrl.trainer.publication import PublishTimes

if TYPE_CHECKING:
    from asyncrl.trainer.loop import StepTimes


class TrainingAlarm(RuntimeError):
    """A diagnostic says that training on would learn from wrong numbers."""


class StepRecorder:
    """Remembers the rollouter's totals between steps."""

    def __init__(self, writer: MetricsWriter, events: EventLog) -> None:
        self._writer = writer
        self._events = events
        self._initial_entropy: float | None = None
        self._previous = RolloutReport()
        self._previous_at = time.monotonic()

    def record(
        self,
        *,
        step: int,
        stats: BatchStats,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        algorithm: Mapping[str, float],
        num_entries: int,
        times: StepTimes,
        ring_depth: int,
        rollout: RolloutReport,
    ) -> None:
        """Append the metrics of step ``step``, which made policy version ``step``, and its alarms.

        Raises:
            TrainingAlarm: engine and trainer disagree beyond what training can bear.
        """
        self._writer.write(
            StepMetrics(
                step=step,
                policy_version=step,
                reward_mean=stats.reward_mean,
                loss=loss,
                grad_norm=grad_norm,
                staleness_mean=stats.staleness_mean,
                staleness_max=stats.staleness_max,
                partial_ratio=stats.partial_ratio,
                partial_max_span=stats.partial_max_span,
                mismatch_kl=algorithm.get("mismatch_k3", math.nan),  # nothing was trained on: unknown
                tokens_trained=stats.num_tokens,
                tokens_generated=max(0, rollout.tokens_generated - self._previous.tokens_generated),
                time_step=times.step_s,
                time_publish=times.publish.total_s,
                time_engine_paused=times.publish.engine_paused_s,
                trainer_idle_ratio=times.idle_ratio,
                engine_idle_ratio=self._engine_idle_ratio(rollout),
                ring_depth=ring_depth,
                extra=_extra(stats, learning_rate, algorithm, num_entries, times, times.publish),
            )
        )
        self._previous, self._previous_at = rollout, time.monotonic()
        self._check(step, algorithm)

    def _check(self, step: int, algorithm: Mapping[str, float]) -> None:
        for alarm in alarms(algorithm, initial_entropy=self._initial_entropy):
            self._events.write("alarm", step=step, level=alarm.level, message=alarm.message)
            if alarm.level == "stop":
                raise TrainingAlarm(f"step {step}: {alarm.message}")
        if self._initial_entropy is None:
            self._initial_entropy = algorithm.get("entropy")

    def _engine_idle_ratio(self, rollout: RolloutReport) -> float:
        """Share of the engines' time since the previous step in which they had nothing to do."""
        elapsed = (time.monotonic() - self._previous_at) * max(1, rollout.num_engines)
        busy = max(0.0, rollout.engine_busy_s - self._previous.engine_busy_s)
        return min(1.0, max(0.0, 1.0 - busy / elapsed))


def _extra(
    stats: BatchStats,
    learning_rate: float,
    algorithm: Mapping[str, float],
    num_entries: int,
    times: StepTimes,
    publish: PublishTimes,
) -> dict[str, float]:
    return {
        "completion/tokens_mean": stats.completion_tokens_mean,
        "lr": learning_rate,
        "time/wait": times.wait_s,
        "time/train": times.train_s,
        "publish/transfer_s": publish.transfer_s,
        "publish/bytes": float(publish.num_bytes),
        "publish/linked": float(publish.num_linked),
        **{f"publish/paused_s/{engine}": seconds for engine, seconds in publish.paused_s.items()},
        "train/entries": float(num_entries),  # computed by rank 0's replica: shared prompts once, padding too
        **{f"algo/{name}": value for name, value in algorithm.items() if name not in ("loss", "tokens")},
    }
