"""Tables of whole models against the layouts of every rank, and parallel sizes as users write them."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from asyncrl.weights.engine_layout import engine_shards
from asyncrl.weights.geometry import ModelError, ModelGeometry
from asyncrl.weights.layout import ShardLayout, hf_tensors
from asyncrl.weights.megatron_layout import megatron_shards
from asyncrl.weights.model_tables import TensorNumbers, engine_table, trainer_table
from asyncrl.weights.splits import (
    EngineSplit,
    TrainerSplit,
    engine_split,
    rank_chunks,
    stage_sizes,
    trainer_split,
)
from asyncrl.weights.tables import BlockTable, RankLayout, decode_layout, encode_layout, table_of
from tests.unit.model_sizes import FAMILIES, reduced


def layouts(shards: list[tuple[ShardLayout, ...]]) -> list[RankLayout]:
    return [RankLayout(held, tuple(shard.dtype or "bfloat16" for shard in held)) for held in shards]


def assert_same(table: BlockTable, expected: BlockTable) -> None:
    for field in dataclasses.fields(BlockTable):
        got, wanted = getattr(table, field.name), getattr(expected, field.name)
        assert np.array_equal(got, wanted), field.name


def numbered(geometry: ModelGeometry) -> dict[str, int]:
    return {name: idx for idx, name in enumerate(hf_tensors(geometry))}


@pytest.mark.parametrize(
    ("family", "split"), itertools.product(FAMILIES, [EngineSplit(1), EngineSplit(4), EngineSplit(4, 2)])
)
def test_engine_tables(family: str, split: EngineSplit) -> None:
    g = reduced(family, num_layers=4)
    ranks = [engine_shards(g, split.tp, rank, split.ep) for rank in range(split.tp)]
    assert_same(engine_table(TensorNumbers(g), split, "bfloat16"), table_of(layouts(ranks), numbered(g)))


TRAINERS = [TrainerSplit(tp=2, dp=2), TrainerSplit(pp=2, vpp=2, ep=2), TrainerSplit(tp=2, pp=3, ep=2, etp=2)]


@pytest.mark.parametrize(("family", "split"), itertools.product(FAMILIES, TRAINERS))
def test_trainer_tables(family: str, split: TrainerSplit) -> None:
    g = reduced(family, num_layers=4)
    ranks = [
        tuple(shard for chunk in rank_chunks(g, split, rank) for shard in megatron_shards(g, chunk))
        for rank in range(split.world_size)
    ]
    assert_same(trainer_table(TensorNumbers(g), split, "bfloat16"), table_of(layouts(ranks), numbered(g)))


def test_names_of_numbers() -> None:
    g = reduced("deepseek_v3", num_layers=3)
    numbers = TensorNumbers(g)
    names = list(hf_tensors(g))
    for number in (0, 1, 70, 300, len(names) - 1):
        assert numbers.name(number) == names[number]


def test_layouts_cross_the_wire_whole() -> None:
    g = reduced("deepseek_v3", num_layers=2)
    [layout] = layouts([engine_shards(g, 4, 1, 2)])
    assert decode_layout(encode_layout(layout)) == layout


def test_ranks_stand_where_megatron_puts_them() -> None:
    g = reduced("qwen3_moe", num_layers=4)
    split = TrainerSplit(tp=2, pp=2, cp=2, ep=4, etp=2)
    assert (split.stage_ranks, split.world_size) == (8, 16)
    [chunk] = rank_chunks(g, split, 8 + 5)
    assert (chunk.tp_rank, chunk.etp_rank, chunk.ep_rank) == (1, 1, 2)
    assert chunk.layer_numbers == (3, 4) and chunk.has_output and not chunk.has_embedding
    first, second = rank_chunks(g, TrainerSplit(pp=2, vpp=2), 1)
    assert (first.layer_numbers, second.layer_numbers) == ((2,), (4,))
    assert not first.has_output and second.has_output


def test_uneven_stages() -> None:
    g = reduced("qwen3", num_layers=7)
    assert stage_sizes(g, TrainerSplit(pp=2, layers=(3, 4))) == (3, 4)
    sizes = stage_sizes(g, TrainerSplit(pp=3))
    assert sum(sizes) == 7 and max(sizes) == 3 and len(sizes) == 3
    assert len(stage_sizes(g, TrainerSplit(pp=6))) == 6
    heavy_ends = dataclasses.replace(g, vocab_size=50_000)
    assert stage_sizes(heavy_ends, TrainerSplit(pp=3))[1] == 5


def test_sizes_as_text() -> None:
    assert trainer_split("tp=4,pp=2,ep=16") == TrainerSplit(tp=4, pp=2, ep=16)
    assert trainer_split("pp=2,layers=3/5").layers == (3, 5)
    assert trainer_split("tp=4,pp=2,ep=16").world_size == 32
    assert engine_split("tp=32,ep=8") == EngineSplit(32, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=4,qp=2", "'qp=2' is not one of tp=N, pp=N"),
        ("tp=4,tp=2", "'tp=2' is not one of"),
        ("tp", "'tp' is not one of"),
        ("tp=x", "tp=x is not a number"),
        ("tp=0", "trainer tp = 0; use 1 or more"),
        ("tp=2,dp=3,ep=4", "choose dp = 2 or a multiple"),
        ("vpp=2", "vpp = 2 needs pp > 1"),
    ],
)
def test_wrong_trainer_sizes(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        trainer_split(text)


def test_wrong_engine_sizes_and_stages() -> None:
    with pytest.raises(ModelError, match="ep must divide tp"):
        engine_split("tp=4,ep=3")
    with pytest.raises(ModelError, match="must hold 16 layers together"):
        stage_sizes(reduced("qwen3"), TrainerSplit(pp=2, layers=(3, 4)))
    with pytest.raises(ModelError, match="more stages than the model has layers, 16"):
        stage_sizes(reduced("qwen3"), TrainerSplit(pp=17))
