"""Deterministic training sequences of unequal length, and their split over replicas and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from megatron_ext.packing import MicroBatch, TrainSequence, pack
from megatron_ext.parallel import ParallelLayout

NUM_SEQUENCES = 12
NUM_SIBLINGS = 3
NUM_MICRO_BATCHES = 4

Item = TypeVar("Item")


def make_sequences(seed: int, vocab_size: int) -> list[TrainSequence]:
    """A global batch: groups of siblings, 2 to 44 tokens each, prompts of 1 to 24; weights sum to 1."""
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(NUM_SEQUENCES // NUM_SIBLINGS):
        prompt = random.integers(0, vocab_size, int(random.integers(1, 25)))
        for _ in range(NUM_SIBLINGS):
            response = random.integers(0, vocab_size, int(random.integers(1, 21)))
            samples.append(
                (np.concatenate((prompt, response)), np.repeat([0, 1], [len(prompt), len(response)]))
            )
    num_trained = sum(int(mask.sum()) for _, mask in samples)
    return [
        TrainSequence(
            token_ids=token_ids.astype(np.int32),
            loss_mask=mask.astype(np.uint8),
            behav_logprobs=(-6 * random.random(len(mask)) * mask).astype(np.float32),
            advantages=np.full(len(mask), random.normal(), np.float32),
            loss_weights=(mask / num_trained).astype(np.float32),
        )
        for token_ids, mask in samples
    ]


def replica_part(items: Sequence[Item], num_replicas: int, dp_rank: int) -> Sequence[Item]:
    """An equal, contiguous share."""
    share = len(items) // num_replicas
    return items[dp_rank * share : (dp_rank + 1) * share]


def micro_batches(sequences: list[TrainSequence], layout: ParallelLayout, dp_rank: int) -> list[MicroBatch]:
    """A replica's micro-batches: of unequal token counts, the last one of the last replica empty."""
    mine = replica_part(sequences, layout.dp, dp_rank)
    num_used = NUM_MICRO_BATCHES - (dp_rank == layout.dp - 1)
    bounds = [round(len(mine) * (idx / num_used) ** 2) for idx in range(num_used + 1)]
    parts = [mine[start:stop] for start, stop in pairwise(bounds)]
    parts += [[]] * (NUM_MICRO_BATCHES - num_used)
    return [pack(part, layout.pad_multiple) for part in parts]
