"""Sharing the sending among ranks that hold the same bytes, and how uneven the best sharing must be.

    groups of ranks, the bytes that only they hold, loads already planned -> bytes of each group's ranks

Integers throughout, so that every rank of every machine finds the same shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.weights.tables import Ints

MAX_SWEEPS = 200


def share_bytes(groups: Sequence[Ints], num_bytes: Sequence[int], loads: Ints) -> list[Ints]:
    """Bytes that each rank of each group sends, so that the most loaded rank has as little as possible.

    One group after the other is poured over its ranks like water over steps, given what the others poured,
    until nothing moves: the sum of squared loads falls with every pour, and its least value also has the
    least maximum. ``loads`` [ranks] is what they send already; it is not changed.
    """
    loads = loads.copy()
    shares = [np.zeros(len(members), dtype=np.int64) for members in groups]
    order = sorted(range(len(groups)), key=lambda group: (len(groups[group]), group))
    tolerance = max(1, sum(num_bytes) // 100_000)
    for sweep in range(MAX_SWEEPS):
        moved = 0
        for group in order:
            members = groups[group]
            if sweep and len(members) == 1:
                continue
            others = loads[members] - shares[group]
            share = pour(others, num_bytes[group])
            moved += int(np.abs(share - shares[group]).sum())
            loads[members] = others + share
            shares[group] = share
        if sweep and moved <= tolerance:
            break
    return shares


def pour(levels: Ints, amount: int) -> Ints:
    """What each of ``levels`` gets of ``amount`` so that the lowest come level; ties go to the first."""
    order = np.argsort(levels, kind="stable")
    steps = levels[order]
    below = np.cumsum(steps)
    count = np.arange(1, len(steps) + 1)
    filled = int(np.count_nonzero(count * steps - below <= amount))
    level, rest = divmod(amount + int(below[filled - 1]), filled)
    share = np.zeros(len(levels), dtype=np.int64)
    share[order[:filled]] = level - steps[:filled] + (np.arange(filled) < rest)
    return share


def stage_skew(groups: Sequence[Ints], num_bytes: Sequence[int], num_ranks: int) -> float:
    """How much more than the mean some rank must send, whatever the sharing.

    For any set of ranks, what only they hold, over their number, is a lower bound of the largest load. The
    sets looked at are every group, and the ranks of groups that overlap, joined from the smallest group on: a
    pipeline stage, an expert-parallel group.
    """
    total = sum(num_bytes)
    if not total:
        return 1.0
    parent = list(range(num_ranks))
    held = [0] * num_ranks
    size = [1] * num_ranks

    def root(rank: int) -> int:
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    most = 0.0
    for group in sorted(range(len(groups)), key=lambda group: (len(groups[group]), group)):
        members = groups[group].tolist()
        top = root(members[0])
        for rank in members[1:]:
            other = root(rank)
            if other != top:
                parent[other] = top
                held[top] += held[other]
                size[top] += size[other]
        held[top] += num_bytes[group]
        most = max(most, held[top] / size[top])
    return max(1.0, most * num_ranks / total)
