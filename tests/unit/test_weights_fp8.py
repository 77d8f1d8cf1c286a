"""Plans for engines of fp8 blocks, carried out by plain torch: values and scales of every block arrive."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from asyncrl.weights.engine_layout import engine_shards
from asyncrl.weights.fp8 import FP8
from asyncrl.weights.geometry import MlaGeometry, ModelError, ModelGeometry, MoeGeometry
from asyncrl.weights.layout import Block, ShardLayout
from asyncrl.weights.megatron_layout import MegatronCoord, megatron_shards
from asyncrl.weights.pack import refuse_quantising
from asyncrl.weights.plan import TransferPlan, plan_transfer
from asyncrl.weights.tables import RankLayout
from tests.moe_reference import ExpertCut
from tests.shard_reference import Tensors, engine_tensors, geometry, megatron_tensors, random_model

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


def scales_of(weight: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each 128 x 128 block of the last two dimensions, ragged at the ends."""
    rows, cols = (-size % BLOCK for size in weight.shape[-2:])
    whole = torch.nn.functional.pad(weight.abs(), (0, cols, 0, rows))
    height, width = whole.shape[-2] // BLOCK, whole.shape[-1] // BLOCK
    return whole.reshape(*weight.shape[:-2], height, BLOCK, width, BLOCK).amax((-3, -1))


def senders_of(
    g: ModelGeometry, model: Tensors, tp: int, ep: int
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
        layouts.append(RankLayout(shards, ("float32",) * len(shards)))
        tensors.append([held[shard.name] for shard in shards])
    return layouts, tensors


def receivers_of(g: ModelGeometry, tp: int, ep: int) -> list[RankLayout]:
    layouts = []
    for rank in range(tp):
        shards = engine_shards(g, tp, rank, ep, fp8=True)
        layouts.append(RankLayout(shards, tuple(shard.dtype or "float32" for shard in shards)))
    return layouts


def carry_out(plan: TransferPlan, sources: list[list[torch.Tensor]]) -> list[Tensors]:
    """Weights keep their values here, which an executor would round; a scale is its block's magnitude."""
    targets = [[torch.full(shard.shape, torch.nan) for shard in side.shards] for side in plan.receivers]
    for move in np.stack(plan.moves.columns(), axis=1).tolist():
        sender, receiver, s_shard, s_row, s_col, t_shard, t_row, t_col, rows, cols, _, _ = move
        source, target = sources[sender][s_shard], targets[receiver][t_shard]
        source = source.reshape(-1, source.shape[-1]) if source.dim() > 1 else source[:, None]
        if plan.receivers[receiver].shards[t_shard].name.endswith("_scale_inv"):
            source = scales_of(source)
        view = target.view(-1, target.shape[-1]) if target.dim() > 1 else target[:, None]
        assert view[t_row : t_row + rows, t_col : t_col + cols].isnan().all()
        view[t_row : t_row + rows, t_col : t_col + cols] = source[s_row : s_row + rows, s_col : s_col + cols]
    return [
        {shard.name: tensor for shard, tensor in zip(side.shards, held, strict=True)}
        for side, held in zip(plan.receivers, targets, strict=True)
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_values_and_scales_arrive(split: tuple[int, int, int, int]) -> None:
    tp, ep, engine_tp, engine_ep = split
    g = blocks_model()
    model = random_model(g, seed=3)
    layouts, sources = senders_of(g, model, tp, ep)
    plan = plan_transfer(layouts, receivers_of(g, engine_tp, engine_ep), bucket_bytes=300_000)
    for rank, held in enumerate(carry_out(plan, sources)):
        expected = engine_tensors(g, model, engine_tp, rank, engine_ep)
        scales = {name: tensor for name, tensor in held.items() if name.endswith("_scale_inv")}
        assert set(held) - set(scales) == set(expected)
        for name, wanted in expected.items():
            rows = min(len(wanted), 101) if "embed" in name or "lm_head" in name else len(wanted)
            assert torch.equal(held[name][:rows].nan_to_num(), wanted[:rows]), name
            if f"{name}_scale_inv" in scales:
                assert torch.equal(scales[f"{name}_scale_inv"], scales_of(wanted)), name
        kinds = {shard.name: shard.dtype for shard in plan.receivers[rank].shards}
        assert [name for name, dtype in kinds.items() if dtype == FP8] == [
            name.removesuffix("_scale_inv") for name in scales
        ]
        assert not any("gate.weight" in name or "norm" in name for name in scales)


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
    with pytest.raises(ModelError, match="fp8 blocks, which cannot be written yet"):
        refuse_quantising(plan)


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
