"""The step plan: which samples of a replica share a packed micro-batch. Integers only, no I/O.

    samples -> sibling_units -> lengths of units
    lengths -> count_microbatches -> (maximum over replicas) agree_microbatches -> plan_step -> StepPlan

Siblings stay together, because a micro-batch computes their common prompt once: what is planned are
*units* of siblings, a sample alone being the smallest.

Every replica must run the same number of micro-batches, or pipeline and data-parallel collectives
would wait for each other for ever; so the replicas agree on a count first and plan second.

Invariants, for the same arguments always the same plan:

* every sample is in exactly one micro-batch;
* no micro-batch exceeds the token budget, counted after padding;
* the number of micro-batches is the agreed one; some may be empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MicroBatches = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SampleLength:
    """What planning needs to know of a sample."""

    group_id: int
    num_tokens: int
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Siblings that are packed behind one copy of their prompt."""

    samples: tuple[int, ...]  # indices into the replica's samples
    num_entries: int  # padded entries of the packed unit


def sibling_units(samples: Sequence[SampleLength], *, budget: int, pad_multiple: int) -> list[Unit]:
    """Cut every group into as few units as the budget allows; groups in order of first appearance.

    A prompt of P tokens shared by several samples is P - 1 entries; a response of R tokens behind it is R
    entries, and a sample of T tokens alone T - 1 (`megatron_ext.packing`). Each is padded.
    """
    groups: dict[int, list[int]] = {}
    for idx, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(idx)
    units: list[Unit] = []
    for members in groups.values():
        current: list[int] = []
        for idx in members:
            if current and _unit_entries(samples, [*current, idx], pad_multiple) > budget:
                units.append(Unit(tuple(current), _unit_entries(samples, current, pad_multiple)))
                current = []
            current.append(idx)
        units.append(Unit(tuple(current), _unit_entries(samples, current, pad_multiple)))
    return units


def _unit_entries(samples: Sequence[SampleLength], members: Sequence[int], multiple: int) -> int:
    first = samples[members[0]]
    if len(members) == 1 or first.num_prompt_tokens < 2:
        return sum(padded_length(max(1, samples[idx].num_tokens - 1), multiple) for idx in members)
    branches = (max(1, samples[idx].num_tokens - first.num_prompt_tokens) for idx in members)
    prefix = padded_length(first.num_prompt_tokens - 1, multiple)
    return prefix + sum(padded_length(branch, multiple) for branch in branches)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The micro-batches of one replica for one step."""

    micro_batches: MicroBatches  # indices into the replica's samples, ascending; () is an empty one
    padded_tokens: tuple[int, ...]  # per micro-batch, every sample padded
    num_tokens: int  # of all samples, unpadded

    @property
    def waste(self) -> float:
        """The share of padding in the tokens that are computed."""
        total = sum(self.padded_tokens)
        return 1 - self.num_tokens / total if total else 0.0

    @property
    def imbalance(self) -> float:
        """The largest micro-batch over the mean one, 1 when all are equal."""
        total = sum(self.padded_tokens)
        return max(self.padded_tokens) * len(self.padded_tokens) / total if total else 1.0


def padded_length(length: int, pad_multiple: int) -> int:
    """``length`` rounded up to a multiple of ``pad_multiple``."""
    return -(-length // pad_multiple) * pad_multiple


def pad_multiple(*, cp: int, tp: int, sequence_parallel: bool) -> int:
    """What a sample's length is padded to: 2 x CP for the zigzag split, x TP for sequence parallelism."""
    zigzag = 2 * cp if cp > 1 else 1
    return zigzag * (tp if sequence_parallel else 1)


def count_microbatches(lengths: Sequence[int], *, budget: int, pad_multiple: int) -> int:
    """The fewest micro-batches (at least 1) into which `plan_step` can cut these samples.

    Args:
        lengths: tokens per sample.
        budget: padded tokens of one micro-batch at most.
        pad_multiple: from `pad_multiple`.

    Raises:
        ValueError: a sample alone exceeds the budget.
    """
    padded = _padded(lengths, budget, pad_multiple)
    count = max(1, -(-sum(padded) // budget))
    while _balance(padded, count, budget) is None:
        count += 1
    return count


def agree_microbatches(counts: Iterable[int], *, multiple_of: int) -> int:
    """The count that every replica runs, given what each needs.

    ``multiple_of`` is PP under the interleaved (VPP) schedule, which needs whole rounds, else 1.
    """
    return padded_length(max(counts), multiple_of)


def plan_step(lengths: Sequence[int], *, budget: int, pad_multiple: int, num_microbatches: int) -> StepPlan:
    """Spread the samples over ``num_microbatches`` micro-batches of nearly equal padded size.

    Args:
        lengths: tokens per sample of this replica.
        budget: padded tokens of one micro-batch at most.
        pad_multiple: from `pad_multiple`.
        num_microbatches: from `agree_microbatches`, at least `count_microbatches` of these lengths.

    Raises:
        ValueError: a sample alone exceeds the budget, or ``num_microbatches`` is too small.
    """
    padded = _padded(lengths, budget, pad_multiple)
    # More bins almost always pack as well, but the greedy rule does not promise it: use fewer then.
    for count in range(num_microbatches, 0, -1):
        bins = _balance(padded, count, budget)
        if bins is not None:
            micro_batches = (*bins, *((),) * (num_microbatches - count))
            return StepPlan(
                micro_batches=micro_batches,
                padded_tokens=tuple(sum(padded[idx] for idx in batch) for batch in micro_batches),
                num_tokens=sum(lengths),
            )
    needed = count_microbatches(lengths, budget=budget, pad_multiple=pad_multiple)
    raise ValueError(
        f"{num_microbatches} micro-batches of {budget} tokens are too few; give {needed} or more"
    )


def _padded(lengths: Sequence[int], budget: int, multiple: int) -> list[int]:
    padded = [padded_length(length, multiple) for length in lengths]
    for idx, length in enumerate(padded):
        if length > budget:
            raise ValueError(
                f"sample {idx} has {lengths[idx]} tokens, {length} padded to a multiple of {multiple}: more"
                f" than a micro-batch; set train.microbatch_tokens = {length} or more"
            )
    return padded


def _balance(padded: Sequence[int], count: int, budget: int) -> MicroBatches | None:
    """Longest sample first, each into the emptiest of ``count`` bins; None where one overflows.

    Graham's LPT rule: the largest bin is within 4/3 of the best possible.
    """
    loads = [0] * count
    bins: list[list[int]] = [[] for _ in range(count)]
    for idx in sorted(range(len(padded)), key=lambda idx: (-padded[idx], idx)):
        emptiest = loads.index(min(loads))
        loads[emptiest] += padded[idx]
        if loads[emptiest] > budget:
            return None
        bins[emptiest].append(idx)
    return tuple(tuple(sorted(batch)) for batch in bins)
