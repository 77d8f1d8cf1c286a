"""The planner and the segment tables: every engine byte exactly once, balanced, the same everywhere.

All ranks of both sides live in this process; buckets are packed and unpacked by the C++ executor and compared
with shards cut by plain torch.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from asyncrl.weights.geometry import ModelError
from asyncrl.weights.layout import Block, ShardLayout
from asyncrl.weights.pack import sender_table
from asyncrl.weights.plan import RankLayout, plan_transfer
from asyncrl.weights.receiver import BucketCopies
from tests.shard_reference import Tensors, engine_tensors, first_difference, geometry, random_model
from tests.unit.plan_execution import transfer
from tests.unit.trainer_ranks import Trainer, engine_ranks, trainer_ranks

TRAINERS = [
    Trainer(tp=1, stages=(4,), pp=1),
    Trainer(tp=2, stages=(4,), pp=1, dp=3),
    Trainer(tp=4, stages=(1, 3), pp=2),
    Trainer(tp=8, stages=(2, 1, 1), pp=3, padded_vocab=256),
    Trainer(tp=2, stages=(1, 1, 1, 1), pp=2, dp=2),
]
ENGINES = (1, 2, 4, 8)
EXPERT_TRAINERS = [
    Trainer(tp=1, stages=(4,), pp=1, dp=2, ep=2),
    Trainer(tp=2, stages=(2, 2), pp=2, dp=2, ep=4),
    Trainer(tp=4, stages=(1, 3), pp=2, ep=2, etp=2),
    Trainer(tp=2, stages=(1, 1, 1, 1), pp=2, dp=2, ep=2, etp=1),
    Trainer(tp=1, stages=(4,), pp=1, dp=8, ep=8),
]
EXPERT_ENGINES = ((1, 1), (2, 2), (4, 1), (4, 2), (8, 8))
PAIRS = [
    *itertools.product(("llama", "qwen2", "qwen3"), TRAINERS, [(tp, 1) for tp in ENGINES]),
    *itertools.product(
        ("qwen3_moe", "deepseek_v3", "deepseek_v3_no_q_lora"), EXPERT_TRAINERS, EXPERT_ENGINES
    ),
]


def named(layout: RankLayout, tensors: list[torch.Tensor]) -> Tensors:
    return {shard.name: tensor for shard, tensor in zip(layout.shards, tensors, strict=True)}


@pytest.mark.parametrize(("family", "trainer", "engine"), PAIRS)
def test_every_engine_rank_gets_its_shard(family: str, trainer: Trainer, engine: tuple[int, int]) -> None:
    g, (engine_tp, engine_ep) = geometry(family), engine
    model = random_model(g, seed=5)
    ranks = trainer_ranks(g, trainer, model)
    receivers = engine_ranks(g, engine_tp, ep_size=engine_ep)
    plan = plan_transfer([layout for layout, _ in ranks], receivers, bucket_bytes=3000)
    targets, digests = transfer(plan, [tensors for _, tensors in ranks])
    for tp_rank, layout in enumerate(receivers):
        expected = engine_tensors(g, model, engine_tp, tp_rank, engine_ep)
        assert first_difference(named(layout, targets[tp_rank]), expected) == "", f"engine rank {tp_rank}"
        assert torch.equal(*digests[tp_rank])
    needed = sum(
        4 * block.rows * block.cols
        for layout in receivers
        for shard in layout.shards
        for block in shard.blocks
    )
    assert plan.total_bytes() == needed
    assert all(bucket.num_bytes <= 3000 for bucket in plan.buckets)


def test_every_element_is_written_once() -> None:
    g = geometry("qwen2")
    model = random_model(g, seed=5)
    for trainer, engine_tp in itertools.product(TRAINERS, ENGINES):
        senders = [layout for layout, _ in trainer_ranks(g, trainer, model)]
        plan = plan_transfer(senders, engine_ranks(g, engine_tp), bucket_bytes=2000)
        for receiver, layout in enumerate(plan.receivers):
            written = [torch.zeros(shard.rows, shard.cols, dtype=torch.int32) for shard in layout.shards]
            moves = plan.moves
            places = (moves.target_shard, moves.target_row, moves.target_col, moves.rows, moves.cols)
            for shard_idx, row, col, rows, cols in np.stack(places, 1)[moves.receiver == receiver]:
                written[shard_idx][row : row + rows, col : col + cols] += 1
            for shard, counts in zip(layout.shards, written, strict=True):
                assert int(counts.max()) <= 1, shard.name
                assert int((counts == 0).sum()) == shard.num_padding, shard.name


def test_replicas_share_the_sending() -> None:
    g = geometry("llama", num_layers=8)
    trainer = Trainer(tp=2, stages=(8,), pp=1, dp=4)
    senders = [layout for layout, _ in trainer_ranks(g, trainer, random_model(g, seed=5))]
    sent = plan_transfer(senders, engine_ranks(g, 4), bucket_bytes=2000).sent_bytes()
    assert max(sent) <= 1.05 * sum(sent) / len(sent), sent


def test_earlier_engines_count_as_load() -> None:
    g = geometry()
    trainer = Trainer(tp=1, stages=(4,), pp=1, dp=2)
    senders = [layout for layout, _ in trainer_ranks(g, trainer, random_model(g, seed=5))]
    busy = [10**9, 0]
    plan = plan_transfer(senders, engine_ranks(g, 1), bucket_bytes=2000, loads=busy)
    assert plan.sent_bytes()[0] == 0


def test_plan_hash_covers_the_plan_and_both_sides() -> None:
    g = geometry()
    model = random_model(g, seed=5)
    senders = [layout for layout, _ in trainer_ranks(g, TRAINERS[2], model)]
    hashes = {
        plan_transfer(senders, engine_ranks(g, 2), 2000).plan_hash,
        plan_transfer(senders, engine_ranks(g, 2), 3000).plan_hash,
        plan_transfer(senders, engine_ranks(g, 4), 2000).plan_hash,
        plan_transfer(senders, engine_ranks(g, 2, "bfloat16"), 2000).plan_hash,
    }
    assert len(hashes) == 4
    assert plan_transfer(senders, engine_ranks(g, 2), 2000).plan_hash in hashes


@pytest.mark.parametrize(
    ("source", "target"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")],
)
def test_the_narrower_dtype_travels(source: str, target: str) -> None:
    g = geometry("qwen3")
    model = random_model(g, seed=5)
    ranks = trainer_ranks(g, TRAINERS[2], model, getattr(torch, source))
    plan = plan_transfer([layout for layout, _ in ranks], engine_ranks(g, 2, target), 2000)
    whole = plan_transfer([layout for layout, _ in ranks], engine_ranks(g, 2, source), 2000)
    assert plan.total_bytes() * (4 if source == "float32" else 2) == whole.total_bytes() * 2
    targets, digests = transfer(plan, [tensors for _, tensors in ranks])
    for tp_rank in range(2):
        expected = {
            name: tensor.bfloat16().to(getattr(torch, target))
            for name, tensor in engine_tensors(g, model, 2, tp_rank).items()
        }
        assert first_difference(named(plan.receivers[tp_rank], targets[tp_rank]), expected) == ""
        assert torch.equal(*digests[tp_rank])


def test_the_bias_of_experts_arrives_in_float32() -> None:
    g = geometry("deepseek_v3")
    model = random_model(g, seed=5)
    ranks = trainer_ranks(g, EXPERT_TRAINERS[1], model, torch.bfloat16)
    receivers = engine_ranks(g, 2, "bfloat16", ep_size=2)
    plan = plan_transfer([layout for layout, _ in ranks], receivers, 2000)
    targets, _ = transfer(plan, [tensors for _, tensors in ranks])
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    for tp_rank in range(2):
        held = named(receivers[tp_rank], targets[tp_rank])
        assert first_difference({name: held[name]}, {name: model[name]}) == ""
        down = "model.layers.2.mlp.experts.w2_weight"
        wanted = engine_tensors(g, model, 2, tp_rank, 2)[down].bfloat16()
        assert first_difference({down: held[down]}, {down: wanted}) == ""


def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    special = [0.0, -0.0, float("inf"), -float("inf"), 1.0 + 2**-8, 1.0 + 3 * 2**-8, 3.4e38, 1e-45]
    values = torch.cat([torch.tensor(special), torch.randn(1000), torch.randn(1000) * 1e30])
    shard = ShardLayout("w", (len(values),), (Block("w", 0, 0, len(values), 1),))
    senders, receivers = [RankLayout((shard,), ("float32",))], [RankLayout((shard,), ("bfloat16",))]
    targets, _ = transfer(plan_transfer(senders, receivers, 1 << 20), [[values]])
    assert first_difference({"w": targets[0][0]}, {"w": values.bfloat16()}) == ""
    targets, _ = transfer(plan_transfer(senders, receivers, 1 << 20), [[values * torch.nan]])
    assert bool(targets[0][0].isnan().all())  # torch's own choice of NaN bits depends on the processor


def test_digests_see_a_flipped_bit_and_swapped_rows() -> None:
    rows = torch.randn(64, 16)
    shard = ShardLayout("w", (64, 16), (Block("w", 0, 0, 64, 16),))
    layouts = [RankLayout((shard,), ("float32",))]
    [bucket] = (plan := plan_transfer(layouts, layouts, 1 << 20)).buckets

    def digest(values: torch.Tensor) -> int:
        total = torch.zeros(1, dtype=torch.int64)
        space = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        table, _ = sender_table(plan, bucket)
        BucketCopies(table, [values], bucket.num_bytes, 1).pack([values], space, total)
        return int(total)

    flipped = rows.clone()
    flipped.view(torch.int32)[40, 3] ^= 1
    swapped = rows[torch.tensor([1, 0, *range(2, 64)])].contiguous()
    assert len({digest(rows), digest(flipped), digest(swapped)}) == 3


def test_impossible_plans_are_refused() -> None:
    g = geometry()
    ranks = trainer_ranks(g, TRAINERS[2], random_model(g, seed=5))
    layouts = [layout for layout, _ in ranks]
    with pytest.raises(ModelError, match=r"no trainer rank holds rows .* of model\.layers\.1"):
        plan_transfer(layouts[:4], engine_ranks(g, 2), 2000)
    with pytest.raises(ModelError, match=r"exceeds half the bucket of 50; raise weights\.bucket_mib"):
        plan_transfer(layouts, engine_ranks(g, 2), 50)
    with pytest.raises(ModelError, match="weights move as float32 or bfloat16"):
        RankLayout(layouts[0].shards, ("float16",) * len(layouts[0].shards))
