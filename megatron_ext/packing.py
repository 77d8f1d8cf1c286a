"""Packing: whole sequences into one flat micro-batch, each token's inputs where it is predicted.

    TrainSequence [T] ... -> pack -> MicroBatch [total] -> zigzag_indices -> the part of one CP rank

The last token of a sequence predicts nothing, so a sequence of T tokens becomes a segment of T - 1 entries,
padded at its end to the layout's multiple. Entry i of a segment holds token i as input and everything that
belongs to the token it predicts, i + 1: label, mask, behaviour and proximal logprobs, advantage, weight.
Attention never crosses a segment, and padding comes after the real entries of its segment, so no real entry
ever sees it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence:
    """One sample as the trainer sees it: T tokens, T >= 2; every array is indexed by token."""

    token_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.uint8]  # [T], 1 on the tokens that are trained on
    behav_logprobs: npt.NDArray[np.float32]  # [T], 0 where the mask is 0
    advantages: npt.NDArray[np.float32]  # [T]
    loss_weights: npt.NDArray[np.float32]  # [T], sum to 1 over the masked tokens of the *global* batch
    prox_logprobs: npt.NDArray[np.float32] | None = None  # [T]; None: the current policy's, detached
    staleness: npt.NDArray[np.int32] | None = None  # [T], trainer's version - the token's; for the metrics

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2:
            raise ValueError(f"a sequence of {len(self.token_ids)} tokens predicts nothing; drop it")
        for name in _PER_TOKEN:
            values = getattr(self, name)
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(f"{name} has {len(values)} entries, token_ids has {len(self.token_ids)}")
        if self.loss_mask[0]:
            raise ValueError("the first token has no predecessor and cannot be trained on; mask it")


_PER_TOKEN = ("loss_mask", "behav_logprobs", "advantages", "loss_weights", "prox_logprobs", "staleness")


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Packed segments; every tensor is on the CPU, [total] = [cu_seqlens[-1]]."""

    token_ids: torch.Tensor  # int64, the inputs; 0 on padding
    labels: torch.Tensor  # int64, the token that follows; 0 on padding
    positions: torch.Tensor  # int64, counted from 0 in every segment, on through its padding
    loss_mask: torch.Tensor  # bool, False on padding
    behav_logprobs: torch.Tensor  # float32
    advantages: torch.Tensor  # float32
    loss_weights: torch.Tensor  # float32, 0 on padding
    prox_logprobs: torch.Tensor | None  # float32
    staleness: torch.Tensor | None  # int64
    cu_seqlens: tuple[int, ...]  # segment s is [cu_seqlens[s], cu_seqlens[s + 1]), padding included
    lengths: tuple[int, ...]  # entries of each segment before padding; 0 for the segment of an empty batch

    @property
    def num_tokens(self) -> int:
        """Entries, padding included."""
        return self.cu_seqlens[-1]

    @property
    def num_trained_tokens(self) -> int:
        return int(self.loss_mask.sum())


def pack(sequences: Sequence[TrainSequence], pad_multiple: int) -> MicroBatch:
    """Lay sequences out behind each other.

    ``pad_multiple`` is `ParallelLayout.pad_multiple`. No sequence at all gives one segment of padding,
    which takes part in every collective and trains nothing.

    Raises:
        ValueError: some sequences have proximal logprobs (or staleness), and some do not.
    """
    lengths = [len(sequence.token_ids) - 1 for sequence in sequences] or [0]
    padded = [max(1, -(-length // pad_multiple)) * pad_multiple for length in lengths]
    cu_seqlens = (0, *np.cumsum(padded).tolist())
    starts = cu_seqlens[:-1]

    def flat(arrays: Iterable[npt.NDArray[np.generic]], dtype: torch.dtype) -> torch.Tensor:
        out = torch.zeros(cu_seqlens[-1], dtype=dtype)
        for start, array in zip(starts, arrays, strict=False):
            out[start : start + len(array)] = torch.as_tensor(np.asarray(array)).to(dtype)
        return out

    def predicted(name: str, dtype: torch.dtype) -> torch.Tensor:
        return flat((getattr(sequence, name)[1:] for sequence in sequences), dtype)

    def optional(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        num_given = sum(getattr(sequence, name) is not None for sequence in sequences)
        if num_given not in (0, len(sequences)):
            raise ValueError(f"{num_given} of {len(sequences)} sequences have {name}; give all or none")
        return predicted(name, dtype) if num_given else None

    return MicroBatch(
        token_ids=flat((sequence.token_ids[:-1] for sequence in sequences), torch.int64),
        labels=predicted("token_ids", torch.int64),
        positions=torch.cat([torch.arange(length) for length in padded]),
        loss_mask=predicted("loss_mask", torch.bool),
        behav_logprobs=predicted("behav_logprobs", torch.float32),
        advantages=predicted("advantages", torch.float32),
        loss_weights=predicted("loss_weights", torch.float32),
        prox_logprobs=optional("prox_logprobs", torch.float32),
        staleness=optional("staleness", torch.int64),
        cu_seqlens=cu_seqlens,
        lengths=tuple(lengths),
    )


def unpack(micro_batch: MicroBatch, values: torch.Tensor) -> list[npt.NDArray[np.float32]]:
    """Per sequence, the values [total] by *token*, [T]: what entry i predicted is at i + 1, and 0 at 0."""
    flat = values.detach().float().cpu().numpy()
    segments = zip(micro_batch.cu_seqlens, micro_batch.lengths, strict=False)
    return [
        np.concatenate([np.zeros(1, np.float32), flat[start : start + length]])
        for start, length in segments
        if length
    ]


def with_prox_logprobs(micro_batch: MicroBatch, prox_logprobs: torch.Tensor) -> MicroBatch:
    """The same micro-batch with the proximal logprobs [total] that `compute_logprobs` gave."""
    if prox_logprobs.shape != micro_batch.labels.shape:
        raise ValueError(f"{len(prox_logprobs)} logprobs for {micro_batch.num_tokens} entries")
    return dataclasses.replace(micro_batch, prox_logprobs=prox_logprobs.detach().float().cpu())


def zigzag_indices(cu_seqlens: Sequence[int], cp_size: int, cp_rank: int) -> torch.Tensor:
    """The entries that a context-parallel rank holds, int64 [total / cp_size], in its local order.

    Each segment is cut into 2 * cp_size chunks; rank r takes chunk r and chunk 2 * cp_size - 1 - r, so that
    every rank has the same share of the causal triangle.

    Raises:
        ValueError: a segment's length is not a multiple of 2 * cp_size.
    """
    if cp_size == 1:
        return torch.arange(cu_seqlens[-1])
    parts = []
    for start, stop in pairwise(cu_seqlens):
        chunk, rest = divmod(stop - start, 2 * cp_size)
        if rest:
            raise ValueError(
                f"a segment of {stop - start} entries cannot be cut in {2 * cp_size}; pack with pad_multiple"
                f" = {2 * cp_size}"
            )
        for chunk_idx in (cp_rank, 2 * cp_size - 1 - cp_rank):
            parts.append(torch.arange(start + chunk_idx * chunk, start + (chunk_idx + 1) * chunk))
    return torch.cat(parts)
