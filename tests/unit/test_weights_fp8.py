"""Plans for engines of fp8 blocks, carried out: codes and scales of every block arrive, bit by bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from asyncrl.weights.engine_layout import engine_shards
from asyncrl.weights.fp8 import FP8
from asyncrl.weights.geometry import MlaGeometry, ModelError, ModelGeometry, MoeGeometry
from asyncrl.weights.layout import Block, ShardLayout
from asyncrl.weights.megatron_layout import MegatronCoord, megatron_shards
from asyncrl.weights.plan import plan_transfer
from asyncrl.weights.tables import RankLayout
from tests.fp8_reference import fp8_tensors
from tests.moe_reference import ExpertCut
from tests.shard_reference import (
    Tensors,
    engine_tensors,
    first_difference,
    geometry,
    megatron_tensors,
    random_model,
)
from tests.unit.plan_execution import transfer

BLOCK = 128
SPLITS = [(1, 1, 1, 1), (2, 2, 2, 2), (2, 4, 2, 1), (1, 2, 2, 1)]  # trainer tp, ep; engine tp, ep


def blocks_model() -> ModelGeometry:
    """Latent attention and experts in whole blocks; the rows of kv_a end within one."""
    return dataclasses.replace(
        geometry("deepseek_v3"),
        num_layers=2,
        hidden_size=256,
        num_heads=4,
        num_kv_heads=4,
        ffn_hidden_size=512,
        moe=MoeGeometry(4, 256, 256, has_bias=True, dense_layers=frozenset({0})),
        mla=MlaGeometry(256, 128, 128, 64, 128),
    )


def senders_of(
    g: ModelGeometry, model: Tensors, tp: int, ep: int, dtype: torch.dtype = torch.float32
) -> tuple[list[RankLayout], list[list[torch.Tensor]]]:
    layouts, tensors = [], []
    for rank in range(max(tp, ep)):
        cut = ExpertCut(ep, rank % ep, te=True, grouped=True)
        coord = MegatronCoord(
            *(tp, rank % tp, (1, 2), True, True, 128, ep, rank % ep),
            transformer_engine=True,
            grouped_experts=True,
        )
        shards = megatron_shards(g, coord)
        held = megatron_tensors(g, model, tp, rank % tp, (0, 1), True, True, 128, cut)
        tensors.append(
            [held[shard.name].to(getattr(torch, shard.dtype) if shard.dtype else dtype) for shard in shards]
        )
        layouts.append(RankLayout(shards, tuple(str(t.dtype).removeprefix("torch.") for t in tensors[-1])))
    return layouts, tensors


def receivers_of(g: ModelGeometry, tp: int, ep: int) -> list[RankLayout]:
    layouts = []
    for rank in range(tp):
        shards = engine_shards(g, tp, rank, ep, fp8=True)
        layouts.append(RankLayout(shards, tuple(shard.dtype or "float32" for shard in shards)))
    return layouts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", SPLITS)
def test_codes_and_scales_arrive(split: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    tp, ep, engine_tp, engine_ep = split
    g = blocks_model()
    model = {name: tensor.to(dtype).float() for name, tensor in random_model(g, seed=3).items()}
    layouts, sources = senders_of(g, model, tp, ep, dtype)
    receivers = receivers_of(g, engine_tp, engine_ep)
    plan = plan_transfer(layouts, receivers, bucket_bytes=300_000)
    targets, digests = transfer(plan, sources)
    for rank, layout in enumerate(receivers):
        expected = fp8_tensors(engine_tensors(g, model, engine_tp, rank, engine_ep), layout.shards)
        held = {shard.name: part for shard, part in zip(layout.shards, targets[rank], strict=True)}
        assert first_difference(held, expected) == "", f"engine rank {rank}"
        assert torch.equal(*digests[rank])
        scales = {name for name in held if name.endswith("_scale_inv")}
        assert not any("gate.weight" in name or "norm" in name for name in scales)
    needed = sum(tensor.numel() * tensor.element_size() for rank in targets for tensor in rank)
    padding = sum(4 * shard.num_padding for layout in receivers for shard in layout.shards)
    narrowed = (
        0
        if dtype == torch.float32
        else sum(  # what is float32 in the engine, and bfloat16 here
            2 * (part.numel() - shard.num_padding)
            for layout, parts in zip(receivers, targets, strict=True)
            for shard, part in zip(layout.shards, parts, strict=True)
            if part.dtype == torch.float32
            and not shard.name.endswith(("_scale_inv", "e_score_correction_bias"))
        )
    )
    assert 0 <= plan.total_bytes() - (needed - padding - narrowed) < 4 * len(plan.buckets)
    assert max(bucket.num_bytes for bucket in plan.buckets) <= 300_000


def test_quantised_rows_stay_together_and_take_a_byte() -> None:
    g = blocks_model()
    layouts, _ = senders_of(g, random_model(g, seed=3), 2, 2)
    plan = plan_transfer(layouts, receivers_of(g, 2, 1), bucket_bytes=300_000)
    moves = plan.moves
    quantised = moves.unit > 1
    assert quantised.any() and set(moves.unit.tolist()) == {1, BLOCK}
    assert (moves.row_bytes[quantised] == moves.cols[quantised]).all()
    ragged = moves.rows[quantised] % BLOCK
    assert set(ragged.tolist()) <= {0, 64}
    for column in (moves.source_row, moves.target_row, moves.source_col, moves.target_col):
        assert not (column[quantised] % BLOCK).any()


def test_cuts_within_a_block_are_refused() -> None:
    g = blocks_model()
    with pytest.raises(ModelError, match=r"layers\.0\..*: its cut does not lie at multiples of 128"):
        engine_shards(g, 4, 1, 1, fp8=True)
    narrow = dataclasses.replace(g, ffn_hidden_size=256)
    layouts, _ = senders_of(narrow, random_model(narrow, seed=3), 4, 4)
    message = r"trainer rank \d holds rows \d+:\d+, columns .* of model\.layers\.0\..*, not whole blocks"
    with pytest.raises(ModelError, match=message):
        plan_transfer(layouts, receivers_of(narrow, 1, 1), 1 << 20)


def test_plain_engines_have_no_scales() -> None:
    shards: tuple[ShardLayout, ...] = engine_shards(blocks_model(), 2, 0)
    assert not any(shard.name.endswith("_scale_inv") or shard.dtype == FP8 for shard in shards)


def test_a_weight_at_an_odd_place_of_its_parameter_is_refused() -> None:
    """Its blocks would be found at multiples of 128 of the parameter."""
    held, wanted = Block("w", 0, 0, 128, 128, local_row=64), Block("w", 0, 0, 128, 128)
    scale = Block("w_scale_inv", 0, 0, 1, 1)
    sender = RankLayout((ShardLayout("fused", (192, 128), (held,)),), ("bfloat16",))
    shards = ShardLayout("w", (128, 128), (wanted,)), ShardLayout("w_scale_inv", (1, 1), (scale,))
    with pytest.raises(ModelError, match="of w, not whole blocks of 128"):
        plan_transfer([sender], [RankLayout(shards, (FP8, "float32"))], 1 << 20)
