"""From ring records to micro-batches.

    ring of this replica --> samples (the same on every rank of the replica) --> advantages, loss weights
                             --> a TrainSequence per sample --> units of siblings --> packed micro-batches

Weights of the loss are fixed by counts of the *global* batch, before it is cut into replicas and
micro-batches, so the loss does not depend on the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.algo.advantages import compute_advantages
from asyncrl.algo.aggregation import BatchCounts, token_weight
from asyncrl.config import Config
from asyncrl.trainer.collectives import max_over_ranks, sum_over_leaders
from asyncrl.trainer.plan import (
    SampleLength,
    agree_microbatches,
    count_microbatches,
    plan_step,
    sibling_units,
)
from asyncrl.types import PolicyVersion, Sample
from megatron_ext.packing import MicroBatch, TrainSequence, pack


@dataclass(frozen=True)
class BatchStats:
    """What a step's global batch looked like."""

    reward_mean: float
    staleness_mean: float  # trainer's version - version of the oldest token, over samples
    staleness_max: int  # trainer's version - oldest version in the batch
    partial_ratio: float  # share of samples whose tokens come from more than one version
    partial_max_span: int  # most versions within one sample, minus one
    completion_tokens_mean: float
    num_samples: int
    num_tokens: int  # model tokens, those that are trained on


def batch_stats(samples: Sequence[Sample], version: PolicyVersion, is_leader: bool) -> BatchStats:
    """Statistics over all replicas' samples; every rank calls this with its replica's."""
    spans = [sample.max_version - sample.min_version for sample in samples]
    staleness = [version - sample.min_version for sample in samples]
    sums = sum_over_leaders(
        [
            len(samples),
            sum(sample.reward for sample in samples),
            sum(int(sample.loss_mask.sum()) for sample in samples),
            sum(staleness),
            sum(span > 0 for span in spans),
        ],
        is_leader,
    )
    num_samples, reward, num_tokens, total_staleness, num_partial = sums
    oldest, longest_span = max_over_ranks([max(staleness, default=0), max(spans, default=0)])
    return BatchStats(
        reward_mean=reward / num_samples,
        staleness_mean=total_staleness / num_samples,
        staleness_max=int(oldest),
        partial_ratio=num_partial / num_samples,
        partial_max_span=int(longest_span),
        completion_tokens_mean=num_tokens / num_samples,
        num_samples=int(num_samples),
        num_tokens=int(num_tokens),
    )


def build_micro_batches(
    samples: Sequence[Sample], config: Config, version: PolicyVersion, pad_multiple: int, is_leader: bool
) -> list[MicroBatch]:
    """This replica's micro-batches, the same number on every replica; every rank calls this.

    A sample whose advantage is 0 has no gradient under any of the objectives, so it is not computed; it
    still counts in the denominators.
    """
    batch = _global_counts(samples, is_leader)
    trained = [(sample, advantage) for sample in samples if (advantage := _advantage(sample, config)) != 0.0]
    sequences = [_sequence(sample, advantage, batch, config, version) for sample, advantage in trained]
    budget = config.train.microbatch_tokens
    units = sibling_units(
        [SampleLength(item.group_id, item.num_tokens, item.num_prompt_tokens) for item, _ in trained],
        budget=budget,
        pad_multiple=pad_multiple,
    )
    lengths = [unit.num_entries for unit in units]
    needed = count_microbatches(lengths, budget=budget, pad_multiple=pad_multiple)
    rounds = config.parallel.pp if config.parallel.vpp > 1 else 1
    agreed = agree_microbatches([int(max_over_ranks([needed])[0])], multiple_of=rounds)
    plan = plan_step(lengths, budget=budget, pad_multiple=pad_multiple, num_microbatches=agreed)
    return [
        pack([sequences[idx] for unit_idx in chosen for idx in units[unit_idx].samples], pad_multiple)
        for chosen in plan.micro_batches
    ]


def _global_counts(samples: Sequence[Sample], is_leader: bool) -> BatchCounts:
    counts = BatchCounts.of([int(sample.loss_mask.sum()) for sample in samples])
    num_samples, num_tokens = sum_over_leaders([counts.num_samples, counts.num_tokens], is_leader)
    return BatchCounts(int(num_samples), int(num_tokens))


def _advantage(sample: Sample, config: Config) -> float:
    advantages = compute_advantages(config.algorithm.advantage, sample.group_rewards)
    return float(advantages[sample.sample_idx])


def _sequence(
    sample: Sample, advantage: float, batch: BatchCounts, config: Config, version: PolicyVersion
) -> TrainSequence:
    weight = token_weight(
        config.algorithm.aggregation,
        batch,
        int(sample.loss_mask.sum()),
        constant_tokens=config.rollout.max_new_tokens,
    )
    mask = sample.loss_mask.astype(np.float32)
    return TrainSequence(
        token_ids=sample.token_ids,
        loss_mask=sample.loss_mask,
        behav_logprobs=sample.behav_logprobs,
        prox_logprobs=None,  # one update per batch: the current logprobs, detached
        advantages=np.float32(advantage) * mask,
        loss_weights=np.float32(weight) * mask,
        staleness=np.where(sample.loss_mask != 0, version - sample.policy_versions, 0).astype(np.int32),
    )
