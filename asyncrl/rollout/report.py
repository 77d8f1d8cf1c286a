"""What rollouts tell the outside: one record per sample, figures per batch, running totals.

All pure functions of what was released; nothing here influences training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.rollout.admission import Placement
from asyncrl.rollout.group import Rewarded
from asyncrl.rollout.rewarding import Decode
from asyncrl.types import FinishReason, PolicyVersion


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """A run of model tokens of one policy version."""

    policy_version: PolicyVersion
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One line of rollouts/step_N.jsonl."""

    batch_idx: int
    group_id: int
    sample_idx: int
    prompt_idx: int
    ring_idx: int
    prompt: str
    completion: str
    reward: float
    reward_parts: dict[str, float]
    finish_reason: str
    num_prompt_tokens: int
    num_new_tokens: int
    num_requests: int
    spans: tuple[VersionSpan, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Figures of one batch of samples.

    ``partial_ratio``: share of samples whose tokens come from more than one policy version;
    ``partial_max_span``: the largest newest - oldest version within a sample.
    """

    reward_mean: float
    num_samples: int
    num_new_tokens: int
    truncated_ratio: float
    partial_ratio: float
    partial_max_span: int
    staleness_mean: float  # batch index - oldest version, over samples
    staleness_max: int


@dataclass(frozen=True, slots=True)
class ReleasedBatch:
    """All groups of a batch are in the rings."""

    batch_idx: int
    records: tuple[RolloutRecord, ...]
    stats: BatchStats


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Running totals since the process started; ``engine_busy_s`` is summed over replicas."""

    tokens_generated: int
    num_requests: int
    num_interrupted: int
    num_lost_requests: int
    engine_busy_s: float
    num_engines: int
    reward_errors: int
    reward_error_rate: float
    groups_running: int
    groups_waiting: int  # finished, behind an older group
    released_batches: int
    next_prompt_idx: int


def describe(rewarded: Rewarded, placement: Placement, decode: Decode) -> tuple[RolloutRecord, ...]:
    """The records of a group, in sample order."""
    prompt = rewarded.samples.prompt
    prompt_text = decode(prompt.token_ids)
    return tuple(
        RolloutRecord(
            batch_idx=placement.batch_idx,
            group_id=sample.group_id,
            sample_idx=sample.sample_idx,
            prompt_idx=prompt.prompt_idx,
            ring_idx=placement.ring_idx,
            prompt=prompt_text,
            completion=decode(trajectory.new_token_ids),
            reward=sample.reward,
            reward_parts=dict(reward.parts),
            finish_reason=sample.finish_reason.value,
            num_prompt_tokens=sample.num_prompt_tokens,
            num_new_tokens=sample.num_tokens - sample.num_prompt_tokens,
            num_requests=num_requests,
            spans=tuple(VersionSpan(*span) for span in trajectory.version_spans),
        )
        for sample, trajectory, reward, num_requests in zip(
            rewarded.samples.samples,
            rewarded.trajectories,
            rewarded.rewards,
            rewarded.num_requests,
            strict=True,
        )
    )


def summarize(batch_idx: int, records: Sequence[RolloutRecord]) -> ReleasedBatch:
    """The figures of a complete batch (at least one record)."""
    count = len(records)
    oldest = [min(s.policy_version for s in r.spans) for r in records]
    newest = [max(s.policy_version for s in r.spans) for r in records]
    staleness = [batch_idx - version for version in oldest]
    stats = BatchStats(
        reward_mean=sum(r.reward for r in records) / count,
        num_samples=count,
        num_new_tokens=sum(r.num_new_tokens for r in records),
        truncated_ratio=sum(r.finish_reason == FinishReason.LENGTH for r in records) / count,
        partial_ratio=sum(len({s.policy_version for s in r.spans}) > 1 for r in records) / count,
        partial_max_span=max(new - old for new, old in zip(newest, oldest, strict=True)),
        staleness_mean=sum(staleness) / count,
        staleness_max=max(staleness),
    )
    return ReleasedBatch(batch_idx, tuple(records), stats)
