"""The planner on random layouts, against a painter, and against brute force over all sets of ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from asyncrl.weights.balance import pour, share_bytes, stage_skew
from asyncrl.weights.geometry import ModelError
from asyncrl.weights.layout import Block, ShardLayout
from asyncrl.weights.moves import assign_owners, cut_messages, group_bytes, limit_messages, pairs_of
from asyncrl.weights.overlap import overlap
from asyncrl.weights.plan import plan_transfer
from asyncrl.weights.tables import BlockTable, RankLayout, number_tensors, table_of
from tests.unit.random_layouts import Case, expected, least_possible_load, paint, random_case

SEEDS = range(150)


def tables(case: Case) -> tuple[BlockTable, BlockTable, list[str]]:
    tensors = number_tensors((case.senders, case.receivers))
    return table_of(case.senders, tensors), table_of(case.receivers, tensors), list(tensors)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_element_arrives_once_from_its_place(seed: int) -> None:
    case = random_case(seed)
    plan = plan_transfer(case.senders, case.receivers, bucket_bytes=96)
    targets, hits = paint(case, plan.moves)
    for got, hit, wanted in zip(targets, hits, expected(case), strict=True):
        for values, times, right in zip(got, hit, wanted, strict=True):
            assert np.array_equal(values, right)
            assert np.array_equal(times, (right >= 0).astype(np.int64))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_sharing_could_be_much_more_even(seed: int) -> None:
    case = random_case(seed)
    senders, receivers, names = tables(case)
    pieces, holders = overlap(senders, receivers, names.__getitem__)
    loads = np.zeros(len(case.senders), dtype=np.int64)
    moves = assign_owners(pieces, holders, senders, receivers, loads)
    sent = np.bincount(moves.sender, weights=moves.num_bytes, minlength=len(loads))
    bound = least_possible_load(case)
    row = int(moves.row_bytes.max())
    totals = group_bytes(pieces, len(holders.groups))
    shares = share_bytes(holders.groups, totals, loads)
    planned = np.zeros(len(loads), dtype=np.int64)
    for members, share in zip(holders.groups, shares, strict=True):
        planned[members] += share
    assert bound - 1e-9 <= planned.max() <= bound * 1.002 + 1
    # Cuts lie between rows, so each group's stretch may be longer or shorter by a row.
    assert sent.max() <= bound + row * sum(len(members) > 1 for members in holders.groups) + 1
    skew = stage_skew(holders.groups, totals, len(loads))
    assert skew <= max(1.0, bound * len(loads) / sum(totals)) + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_messages(seed: int) -> None:
    """One per pair and round, none too large, alike in size, and each pair's rounds ascend."""
    case = random_case(seed)
    senders, receivers, names = tables(case)
    pieces, holders = overlap(senders, receivers, names.__getitem__)
    loads = np.zeros(len(case.senders), dtype=np.int64)
    whole = assign_owners(pieces, holders, senders, receivers, loads)
    counts = limit_messages(whole, 96)
    moves, messages = cut_messages(whole, counts, len(case.receivers))
    assert int(messages.num_bytes.max()) <= 96
    keys = np.stack((messages.sender, messages.receiver, messages.round), axis=1)
    assert len(np.unique(keys, axis=0)) == len(keys)
    assert np.all(np.diff(messages.round) >= 0)
    assert int(moves.num_bytes.sum()) == int(whole.num_bytes.sum())
    for idx in range(len(messages)):
        part = moves.take(np.arange(messages.first[idx], messages.first[idx + 1]))
        assert int(part.num_bytes.sum()) == messages.num_bytes[idx]
        assert set(part.sender.tolist()) == {int(messages.sender[idx])}
        assert set(part.receiver.tolist()) == {int(messages.receiver[idx])}
        alignment = part.row_bytes & -part.row_bytes
        assert np.all(np.diff(alignment) <= 0)
    pair, num_pairs = pairs_of(whole)
    totals = np.bincount(pair, weights=whole.num_bytes, minlength=num_pairs)
    longest = int(whole.row_bytes.max())
    for sender, receiver, num_bytes in zip(
        messages.sender, messages.receiver, messages.num_bytes, strict=True
    ):
        mine = pair[np.argmax((whole.sender == sender) & (whole.receiver == receiver))]
        assert num_bytes <= totals[mine] / counts[mine] + longest


@pytest.mark.parametrize("seed", range(40))
def test_the_widest_holders_give(seed: int) -> None:
    """A rank that holds float32 is asked, not one that holds the same in bfloat16."""
    case = random_case(seed)
    narrow = dataclasses.replace(case.senders[-1], dtypes=("bfloat16",) * len(case.senders[-1].shards))
    senders, receivers, names = tables(dataclasses.replace(case, senders=(*case.senders[:-1], narrow)))
    pieces, holders = overlap(senders, receivers, names.__getitem__)
    loads = np.zeros(len(case.senders), dtype=np.int64)
    moves = assign_owners(pieces, holders, senders, receivers, loads)
    for sender, shard, row, col in zip(
        *(
            column.tolist()
            for column in (moves.sender, moves.source_shard, moves.source_row, moves.source_col)
        ),
        strict=True,
    ):
        if sender != len(case.senders) - 1:
            continue
        block = case.senders[sender].shards[shard].blocks[0]
        held = case.holders[block.tensor][
            :, block.row + row - block.local_row, block.col + col - block.local_col
        ]
        assert held.tolist() == [False] * sender + [True]


def test_pouring_fills_the_lowest_first() -> None:
    assert pour(np.array([5, 0, 3]), 4).tolist() == [0, 4, 0]
    assert pour(np.array([5, 0, 3]), 5).tolist() == [0, 4, 1]
    assert pour(np.array([5, 0, 3]), 9).tolist() == [0, 6, 3]
    assert pour(np.array([2, 2]), 3).tolist() == [2, 1]
    assert pour(np.array([7]), 0).tolist() == [0]


@pytest.mark.parametrize("seed", range(50))
def test_pouring_is_level(seed: int) -> None:
    rng = np.random.default_rng(seed)
    levels, amount = rng.integers(0, 1000, int(rng.integers(1, 20))), int(rng.integers(0, 20_000))
    share = pour(levels, amount)
    assert share.sum() == amount and share.min() >= 0
    filled = (levels + share)[share > 0]
    if len(filled):
        assert filled.max() - filled.min() <= 1
        assert levels[share == 0].min(initial=1 << 40) >= filled.max() - 1


def test_loads_are_taken_into_account() -> None:
    groups = [np.array([0, 1]), np.array([1, 2])]
    shares = share_bytes(groups, [100, 100], np.array([100, 0, 0]))
    loads = np.array([100, 0, 0])
    for members, share in zip(groups, shares, strict=True):
        loads[members] += share
    assert loads.tolist() == [100, 100, 100]


def test_a_stage_that_alone_holds_much_is_the_skew() -> None:
    groups = [np.array([0, 1]), np.array([2, 3]), np.array([2])]
    assert stage_skew(groups, [100, 300, 0], 4) == pytest.approx(1.5)
    assert stage_skew(groups, [100, 100, 200], 4) == pytest.approx(2.0)
    assert stage_skew(groups, [0, 0, 0], 4) == 1.0
    nested = [np.array([0]), np.array([1]), np.array([0, 1]), np.array([2, 3, 4, 5])]
    assert stage_skew(nested, [50, 50, 100, 100], 6) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "hole", [Block("w", 6, 0, 4, 4), Block("w", 0, 2, 4, 4), Block("v", 0, 0, 1, 1), Block("w", 3, 3, 1, 2)]
)
def test_what_nobody_holds_is_named(hole: Block) -> None:
    held = Block("w", 0, 0, 8, 4)
    other = Block("z", 0, 0, 8, 4, 8, 0)
    sender = RankLayout((ShardLayout("w", (16, 4), (held, other)),), ("float32",))
    receiver = RankLayout((ShardLayout("w", (hole.rows, hole.cols), (hole,)),), ("float32",))
    with pytest.raises(
        ModelError, match=rf"no trainer rank holds rows \d+:\d+, columns \d+:\d+ of {hole.tensor}"
    ):
        plan_transfer([sender], [receiver], 1 << 10)
