"""The training loop of one rank.

    wait for a batch -> forward, backward, update -> publish -> checkpoint -> the next batch
         (ring)              (megatron_ext)          (weights)   (megatron_ext)

What blocks what: the loop waits for the ring only when rollouts are slower than training; engines wait for
the loop only while a publication pauses them. With ``weights.overlap`` a publication goes on during the next
step. Batch b (0-based) is trained at policy version b, and makes
version b + 1. While it waits for a batch, the loop brings engines that came back up to the current version.
Rank 0 decides (train, stop, catch up) and broadcasts, so all ranks take the same path.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from asyncrl.algo.metrics import summarize
from asyncrl.algo.objectives import build_objective
from asyncrl.config import Config
from asyncrl.control.client import ControlClient
from asyncrl.control.messages import CheckpointDone, Phase, StepDone, TrainerStart
from asyncrl.ring.batch import Batch
from asyncrl.ring.errors import RingTimeout
from asyncrl.ring.ring import Ring
from asyncrl.trainer.batch import BatchStats, batch_stats, build_micro_batches
from asyncrl.trainer.checkpoints import Checkpoints
from asyncrl.trainer.collectives import broadcast_json, sum_over_leaders
from asyncrl.trainer.publication import PolicyPublisher, PublishTimes
from asyncrl.trainer.record import StepRecorder
from asyncrl.trainer.verify import Verifier
from asyncrl.types import Sample
from megatron_ext.parallel import RankInfo
from megatron_ext.policy import MegatronPolicy, StepStats

BATCH_POLL_S = 1.0  # how soon a wait for a batch notices that something else is to be done

TRAIN, STOP, CATCH_UP = "train", "stop", "catch up"  # what rank 0 decides between two steps


class BatchTimeout(RuntimeError):
    """No batch came within train.batch_timeout_s."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, and the share of it that the trainer waited for samples."""

    wait_s: float
    train_s: float
    publish: PublishTimes
    step_s: float

    @property
    def idle_ratio(self) -> float:
        return self.wait_s / self.step_s


class StopSignal:
    """Remembers that SIGTERM or SIGUSR1 (Slurm's warning) came; the loop stops at the next step."""

    def __init__(self) -> None:
        self.received = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, *_: object) -> None:
        self.received = True


class TrainingLoop:
    """One rank's part in training; every rank runs the same calls in the same order."""

    def __init__(
        self,
        config: Config,
        rank: RankInfo,
        policy: MegatronPolicy,
        ring: Ring,
        publisher: PolicyPublisher,
        checkpoints: Checkpoints,
        verifier: Verifier | None,
        control: ControlClient | None,
        recorder: StepRecorder | None,
    ) -> None:
        self._config = config
        self._rank = rank
        self._policy = policy
        self._ring = ring
        self._group = ring.group("trainer", rank=_rank_in_replica(rank, config), size=_replica_size(config))
        self._share = config.train.samples_per_step // config.parallel.dp
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._verifier = verifier
        self._control = control  # on rank 0 only
        self._recorder = recorder  # on rank 0 only
        self._objective = build_objective(config.algorithm)
        self._stop_signal = StopSignal()
        self._pad_multiple = policy.layout.pad_multiple

    def run(self, first_step: int, rings: tuple[str, ...]) -> None:
        """Train from ``first_step`` to the configured number of steps, or until asked to stop."""
        config, control = self._config, self._control
        if control:
            start = TrainerStart(step=first_step, policy_version=first_step, rings=rings)
            control.post("trainer/start", start)
        self._publisher.connect_engines()
        self._publish(first_step)
        if control:
            control.post("phase", Phase.TRAINING)
        step = first_step
        saved_step = first_step if first_step > 0 else -1
        while step < config.train.steps:
            started = time.monotonic()
            samples = self._next_batch(step)
            if samples is None:
                break
            waited = time.monotonic()
            stats = batch_stats(samples, step, self._rank.is_replica_leader)
            result, num_entries = self._update(samples, step)
            trained = time.monotonic()
            step += 1
            if control:
                control.post("trainer/step", StepDone(batch_idx=step - 1))
            published = self._publish(step)
            times = StepTimes(waited - started, trained - waited, published, time.monotonic() - started)
            self._record(step, stats, result, num_entries, times)
            if config.checkpoint.every and step % config.checkpoint.every == 0:
                saved_step = self._save(step)
        self._publisher.finish()
        if saved_step != step:
            self._save(step)
        if control:
            control.post("phase", Phase.FINISHING)

    def _next_batch(self, version: int) -> list[Sample] | None:
        """This replica's share of the next batch, or None when the run is to stop here.

        Engines that came back meanwhile get ``version``, the current one.
        """
        deadline = time.monotonic() + self._config.train.batch_timeout_s
        while True:
            batch, decision = self._batch_or_else(self._control, deadline) if self._control else (None, "")
            decision = broadcast_json({"decision": decision})["decision"]
            if decision == STOP:
                return None
            if decision == TRAIN:
                break
            self._publisher.catch_up(version)
        if batch is None:
            batch = self._group.get_batch(self._share, timeout=self._config.train.batch_timeout_s)
        with batch:
            samples = batch.samples()
            batch.ack()
        return samples

    def _batch_or_else(self, control: ControlClient, deadline: float) -> tuple[Batch | None, str]:
        """Rank 0's share, as soon as it is there; or what is to be done instead.

        Raises:
            BatchTimeout: nothing happened by the deadline.
        """
        reason = ""
        while time.monotonic() < deadline:
            state = control.state()
            if self._stop_signal.received or state.stop_requested:
                return None, STOP
            if self._publisher.has_news(state):
                return None, CATCH_UP
            try:
                return self._group.get_batch(self._share, timeout=BATCH_POLL_S), TRAIN
            except RingTimeout as error:
                reason = str(error)
        raise BatchTimeout(
            f"no batch of {self._share} samples within {self._config.train.batch_timeout_s:.0f} s ({reason});"
            " see the rollouter's log, or raise train.batch_timeout_s"
        )

    def _update(self, samples: list[Sample], version: int) -> tuple[StepStats, int]:
        """One optimizer step on the batch; returns its statistics and how many entries were computed."""
        micro_batches = build_micro_batches(
            samples, self._config, version, self._policy.layout.pad_multiple, self._rank.is_replica_leader
        )
        temperature = self._config.rollout.temperature
        result = self._policy.train_step(micro_batches, self._objective, temperature=temperature)
        return result, sum(micro_batch.num_tokens for micro_batch in micro_batches)

    def _publish(self, version: int) -> PublishTimes:
        times = self._publisher.publish(version)
        if self._verifier:
            self._publisher.finish()  # what is compared must have arrived, and not have been trained on
            self._verifier.compare(version, self._publisher.last_result)
        return times

    def _record(
        self, step: int, stats: BatchStats, result: StepStats, num_entries: int, times: StepTimes
    ) -> None:
        depth = sum_over_leaders([self._ring.stats().depth], self._rank.is_replica_leader)[0]
        if self._recorder and self._control:
            self._recorder.record(
                step=step,
                stats=stats,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=result.learning_rate,
                algorithm=summarize(result.sums),
                num_entries=num_entries,
                times=times,
                ring_depth=int(depth),
                rollout=self._control.state().rollout,
            )

    def _save(self, step: int) -> int:
        """Make everything up to ``step`` durable, and tell the coordinator."""
        rollout = self._control.state().rollout.model_dump() if self._control else None
        common = broadcast_json({"step": step, "policy_version": step, "rollout": rollout})
        self._checkpoints.save(self._policy, step, common)
        if self._control:
            oldest = self._checkpoints.oldest_step()
            self._control.post("trainer/checkpoint", CheckpointDone(step=step, oldest_step=oldest))
        return step


def _replica_size(config: Config) -> int:
    return config.parallel.world_size // config.parallel.dp


def _rank_in_replica(rank: RankInfo, config: Config) -> int:
    """0 for the leader."""
    within: int = (rank.pp_rank * config.parallel.cp + rank.cp_rank) * config.parallel.tp + rank.tp_rank
    return within
