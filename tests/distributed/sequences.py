"""Deterministic training sequences of unequal length, and their split over replicas and micro-batches."""

from __future__ import annotations

import numpy as np

from megatron_ext.packing import MicroBatch, TrainSequence, pack
from megatron_ext.parallel import ParallelLayout

NUM_SEQUENCES = 12
NUM_MICRO_BATCHES = 4


def make_sequences(seed: int, vocab_size: int) -> list[TrainSequence]:
    """A global batch: 6 to 48 tokens each, prompts of any length, weights that sum to 1."""
    random = np.random.default_rng(seed)
    masks = []
    for _ in range(NUM_SEQUENCES):
        length = int(random.integers(6, 48))
        mask = np.zeros(length, np.uint8)
        mask[int(random.integers(1, length - 1)) :] = 1
        masks.append(mask)
    num_trained = sum(int(mask.sum()) for mask in masks)
    return [
        TrainSequence(
            token_ids=random.integers(0, vocab_size, len(mask)).astype(np.int32),
            loss_mask=mask,
            behav_logprobs=(-6 * random.random(len(mask)) * mask).astype(np.float32),
            advantages=np.full(len(mask), random.normal(), np.float32),
            loss_weights=(mask / num_trained).astype(np.float32),
        )
        for mask in masks
    ]


def split_sequences(
    sequences: list[TrainSequence], layout: ParallelLayout, dp_rank: int
) -> list[list[TrainSequence]]:
    """This replica's micro-batches: of unequal token counts, the last one of the last replica empty."""
    mine = sequences[dp_rank :: layout.dp]
    used = NUM_MICRO_BATCHES - (dp_rank == layout.dp - 1)
    bounds = [round(len(mine) * (idx / used) ** 2) for idx in range(used + 1)]
    parts = [mine[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)]
    return [*parts, *([] for _ in range(NUM_MICRO_BATCHES - used))]


def micro_batches(sequences: list[TrainSequence], layout: ParallelLayout, dp_rank: int) -> list[MicroBatch]:
    return [pack(part, layout.pad_multiple) for part in split_sequences(sequences, layout, dp_rank)]
