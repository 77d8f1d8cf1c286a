"""Packing: whole sequences into one flat micro-batch, each token's inputs where it is predicted.

    TrainSequence [T] ... -> pack -> MicroBatch [total] -> zigzag_indices -> the part of one CP rank

The last token of a sequence predicts nothing, so T tokens become T - 1 entries. Entry i holds token i as
input and everything that belongs to the token it predicts, i + 1: label, mask, behaviour and proximal
logprobs, advantage, weight.

Siblings share their prompt: consecutive sequences that begin with the same untrained tokens are laid out as
one *prefix* segment, computed once, and one *branch* per sequence, which attends to the prefix and to itself.
Hidden states and gradients are those of the whole sequences. The prefix stops before the last common token:
that one predicts a different token in each branch.

    prompt a b c, responses d e | f      prefix: a b    branches: c d | c    (labels: d e | f)

Every segment is padded at its end to the layout's multiple. Nothing attends to another sequence, and padding
comes after the real entries of its segment, so no real entry ever sees it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class Segment:
    """Entries [start, stop) of a micro-batch, the first ``num_entries`` of them real.

    A branch continues the segment ``prefix``, by its index; a prefix, and a sequence that shares nothing,
    has none. ``num_before`` is how many entries of the sequence come before, all of them in the prefix.
    """

    start: int
    stop: int
    num_entries: int
    prefix: int | None = None
    num_before: int = 0
    ends_sequence: bool = True  # False: a prefix, or the padding of an empty micro-batch


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Packed segments, one behind the other; every tensor is on the CPU, [total]."""

    token_ids: torch.Tensor  # int64, the inputs; 0 on padding
    labels: torch.Tensor  # int64, the token that follows; 0 on padding
    positions: torch.Tensor  # int64, in the sequence; counted on through padding
    loss_mask: torch.Tensor  # bool, False on padding
    behav_logprobs: torch.Tensor  # float32
    advantages: torch.Tensor  # float32
    loss_weights: torch.Tensor  # float32, 0 on padding
    prox_logprobs: torch.Tensor | None  # float32
    staleness: torch.Tensor | None  # int64
    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        """Entries, padding included."""
        return self.segments[-1].stop

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Where segments begin and end, padding included."""
        return (0, *(segment.stop for segment in self.segments))


def pack(sequences: Sequence[TrainSequence], pad_multiple: int, *, share_prefixes: bool = True) -> MicroBatch:
    """Lay sequences out behind each other.

    ``pad_multiple`` is `ParallelLayout.pad_multiple`. No sequence at all gives one segment of padding,
    which takes part in every collective and trains nothing.

    Raises:
        ValueError: some sequences have proximal logprobs (or staleness), and some do not.
    """
    segments, pieces = _lay_out(sequences, pad_multiple, share_prefixes)
    total = segments[-1].stop

    def flat(name: str, shift: int, dtype: torch.dtype) -> torch.Tensor:
        out = torch.zeros(total, dtype=dtype)
        for segment, sequence in zip(segments, pieces, strict=False):
            first = segment.num_before + shift
            values = getattr(sequence, name)[first : first + segment.num_entries]
            out[segment.start : segment.start + segment.num_entries] = torch.as_tensor(values).to(dtype)
        return out

    def optional(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        num_given = sum(getattr(sequence, name) is not None for sequence in sequences)
        if num_given not in (0, len(sequences)):
            raise ValueError(f"{num_given} of {len(sequences)} sequences have {name}; give all or none")
        return flat(name, 1, dtype) if num_given else None

    return MicroBatch(
        token_ids=flat("token_ids", 0, torch.int64),
        labels=flat("token_ids", 1, torch.int64),
        positions=torch.cat([torch.arange(item.stop - item.start) + item.num_before for item in segments]),
        loss_mask=flat("loss_mask", 1, torch.bool),
        behav_logprobs=flat("behav_logprobs", 1, torch.float32),
        advantages=flat("advantages", 1, torch.float32),
        loss_weights=flat("loss_weights", 1, torch.float32),
        prox_logprobs=optional("prox_logprobs", torch.float32),
        staleness=optional("staleness", torch.int64),
        segments=segments,
    )


def _lay_out(
    sequences: Sequence[TrainSequence], pad_multiple: int, share_prefixes: bool
) -> tuple[tuple[Segment, ...], list[TrainSequence]]:
    """The segments, and the sequence that each takes its entries from (a prefix: from its first branch)."""
    segments: list[Segment] = []
    pieces: list[TrainSequence] = []

    def add(num_entries: int, prefix: int | None, num_before: int, ends_sequence: bool) -> None:
        start = segments[-1].stop if segments else 0
        stop = start + max(1, -(-num_entries // pad_multiple)) * pad_multiple
        segments.append(Segment(start, stop, num_entries, prefix, num_before, ends_sequence))

    for siblings in _sibling_runs(sequences) if share_prefixes else ([item] for item in sequences):
        num_shared = _num_untrained(siblings[0]) - 1 if len(siblings) > 1 else 0
        prefix = len(segments) if num_shared else None
        if num_shared:
            add(num_shared, None, 0, False)
            pieces.append(siblings[0])
        for sequence in siblings:
            add(len(sequence.token_ids) - 1 - num_shared, prefix, num_shared, True)
            pieces.append(sequence)
    if not segments:
        add(0, None, 0, False)
    return tuple(segments), pieces


def _sibling_runs(sequences: Sequence[TrainSequence]) -> list[list[TrainSequence]]:
    """Consecutive sequences with the same untrained beginning, of at least two tokens."""
    runs: list[list[TrainSequence]] = []
    for sequence in sequences:
        prompt = sequence.token_ids[: _num_untrained(sequence)]
        if runs and len(prompt) > 1:
            first = runs[-1][0]
            if np.array_equal(prompt, first.token_ids[: _num_untrained(first)]):
                runs[-1].append(sequence)
                continue
        runs.append([sequence])
    return runs


def _num_untrained(sequence: TrainSequence) -> int:
    """Tokens before the first trained one; at most all but the last."""
    trained = np.flatnonzero(sequence.loss_mask)
    return int(trained[0]) if len(trained) else len(sequence.token_ids) - 1


def unpack(micro_batch: MicroBatch, values: torch.Tensor) -> list[npt.NDArray[np.float32]]:
    """Per sequence, the values [total] by *token*, [T]: what entry i predicted is at i + 1.

    0 where nothing can have been predicted: at the first token, and inside a shared prefix.
    """
    flat = values.detach().float().cpu().numpy()
    out = []
    for segment in micro_batch.segments:
        if segment.ends_sequence:
            own = flat[segment.start : segment.start + segment.num_entries]
            out.append(np.concatenate([np.zeros(segment.num_before + 1, np.float32), own]))
    return out


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
