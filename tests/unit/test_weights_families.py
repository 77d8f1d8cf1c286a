"""Families: each is one short file, and the example of docs/families.md works as it stands."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
from safetensors import safe_open

from asyncrl.weights import families, layout
from asyncrl.weights.engine_layout import engine_shards
from asyncrl.weights.family import Family
from asyncrl.weights.geometry import ModelGeometry, MoeGeometry
from asyncrl.weights.layout import hf_tensors, layer_table
from asyncrl.weights.megatron_layout import MegatronCoord, megatron_shards
from asyncrl.weights.plan import plan_transfer
from asyncrl.weights.tables import RankLayout
from tests.tiny_models import Kind, make_tiny
from tests.unit.model_sizes import FAMILIES, reduced

DOCS = Path(__file__).parents[2] / "docs" / "families.md"


def test_a_family_is_a_short_file() -> None:
    files = [path for path in Path(families.__file__).parent.glob("*.py") if path.name != "__init__.py"]
    assert {path.stem for path in files} == set(FAMILIES)
    assert all(path.read_text().count("\n") < 100 for path in files)
    assert set(families.BY_NAME) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_sides_name_every_tensor(family: str) -> None:
    g = reduced(family, num_layers=2)
    for layer_idx in range(2):
        table = layer_table(g, layer_idx)
        for rows in (table.megatron, table.engine):
            named = {part for row in rows for part in row.parts}
            assert named == set(table.tensors)


@pytest.fixture
def mixtral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelGeometry:
    """A geometry of the family that the documentation adds."""
    path = tmp_path / "mixtral.py"
    path.write_text(DOCS.read_text().split("```python\n")[1].split("```")[0])
    spec = importlib.util.spec_from_file_location("mixtral", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    family: Family = module.FAMILY
    monkeypatch.setitem(layout.BY_NAME, family.name, family)
    moe = MoeGeometry(8, 64, 0, has_bias=False, dense_layers=frozenset())
    return dataclasses.replace(reduced("llama", num_layers=2), family="mixtral", moe=moe)


def test_the_documented_example_is_a_family(mixtral: ModelGeometry) -> None:
    assert hf_tensors(mixtral)["model.layers.1.block_sparse_moe.experts.7.w2.weight"] == (128, 64)
    receivers = [engine_shards(mixtral, 4, rank, 2) for rank in range(4)]
    shapes = {shard.name: shard.shape for shard in receivers[0]}
    assert shapes["model.layers.0.block_sparse_moe.experts.w13_weight"] == (4, 64, 128)
    coords = [MegatronCoord(2, rank, (1, 2), True, True, 1024, 2, rank) for rank in range(2)]
    senders = [megatron_shards(mixtral, coord) for coord in coords]

    def ranks(held: list[tuple[layout.ShardLayout, ...]]) -> list[RankLayout]:
        return [RankLayout(shards, ("bfloat16",) * len(shards)) for shards in held]

    plan = plan_transfer(ranks(senders), ranks(receivers), 1 << 20)
    elements = sum(block.rows * block.cols for held in receivers for shard in held for block in shard.blocks)
    assert plan.total_bytes() == 2 * elements


def test_the_documentation_lists_every_family() -> None:
    text = DOCS.read_text()
    for architecture, family in families.FAMILIES.items():
        assert f"| `{family.name}.py` | {architecture} |" in text


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_a_model_that_transformers_saved_is_read(kind: Kind, tmp_path: Path) -> None:
    """Its config.json spells some keys in another way than those of the published models."""
    directory = make_tiny(kind, tmp_path)
    with safe_open(directory / "model.safetensors", "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert hf_tensors(ModelGeometry.from_hf(directory)) == saved
