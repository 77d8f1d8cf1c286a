"""Layouts of both sides against shards cut from whole tensors by plain torch."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.weights.engine_layout import check_manifest, engine_shards, padded_vocab
from asyncrl.weights.geometry import ModelError, ModelGeometry
from asyncrl.weights.hf import read_shards
from asyncrl.weights.layout import ShardLayout, hf_tensors
from asyncrl.weights.megatron_layout import MegatronCoord, megatron_shards
from tests.shard_reference import (
    Tensors,
    engine_tensors,
    first_difference,
    geometry,
    megatron_tensors,
    random_model,
)

FAMILIES = ("llama", "qwen2", "qwen3")


def fill(shards: tuple[ShardLayout, ...], directory: Path) -> Tensors:
    tensors = {shard.name: torch.full(shard.shape, torch.nan) for shard in shards}
    read_shards(directory, shards, tensors)
    return tensors


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Tensors]:
    directory = tmp_path_factory.mktemp(request.param)
    model = random_model(geometry(request.param), seed=1)
    save_file(model, directory / "model.safetensors")
    return request.param, directory, model


def test_hf_tensors_are_those_of_the_family(family: tuple[str, Path, Tensors]) -> None:
    name, _, model = family
    assert hf_tensors(geometry(name)) == {key: tuple(tensor.shape) for key, tensor in model.items()}


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_megatron_shards(family: tuple[str, Path, Tensors], tp_size: int) -> None:
    name, directory, model = family
    stages = [((0, 1, 2, 3), True, True), ((0,), True, False), ((1, 2), False, False), ((3,), False, True)]
    for tp_rank, (layers, first, last) in itertools.product(range(tp_size), stages):
        coord = MegatronCoord(tp_size, tp_rank, tuple(idx + 1 for idx in layers), first, last, 128)
        actual = fill(megatron_shards(geometry(name), coord), directory)
        expected = megatron_tensors(geometry(name), model, tp_size, tp_rank, layers, first, last, 128)
        assert first_difference(actual, expected) == "", coord


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_engine_shards(family: tuple[str, Path, Tensors], tp_size: int) -> None:
    name, directory, model = family
    for tp_rank in range(tp_size):
        shards = engine_shards(geometry(name), tp_size, tp_rank)
        expected = engine_tensors(geometry(name), model, tp_size, tp_rank)
        assert first_difference(fill(shards, directory), expected) == "", tp_rank
        check_manifest(shards, {key: tuple(value.shape) for key, value in expected.items()}, "engine")


def test_sharded_checkpoint_reads_the_same(family: tuple[str, Path, Tensors], tmp_path: Path) -> None:
    name, _, model = family
    weight_map = {}
    for part_idx in range(3):
        names = list(model)[part_idx::3]
        file_name = f"part-{part_idx}.safetensors"
        save_file({key: model[key] for key in names}, tmp_path / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    expected = engine_tensors(geometry(name), model, 2, 1)
    assert first_difference(fill(engine_shards(geometry(name), 2, 1), tmp_path), expected) == ""


def test_values_are_cast_to_the_parameter(family: tuple[str, Path, Tensors]) -> None:
    name, directory, model = family
    shards = engine_shards(geometry(name), 2, 0)
    tensors = {shard.name: torch.zeros(shard.shape, dtype=torch.bfloat16) for shard in shards}
    read_shards(directory, shards, tensors)
    expected = {key: value.bfloat16() for key, value in engine_tensors(geometry(name), model, 2, 0).items()}
    assert first_difference(tensors, expected) == ""


@pytest.mark.parametrize(
    ("vocab", "tp_size", "padded"), [(64, 1, 64), (65, 2, 128), (101, 3, 192), (128, 3, 192)]
)
def test_padded_vocabulary(vocab: int, tp_size: int, padded: int) -> None:
    assert padded_vocab(vocab, tp_size) == padded


def test_impossible_cuts_are_refused() -> None:
    with pytest.raises(ModelError, match="40 cannot be cut into 3 equal parts"):
        engine_shards(geometry(), 3, 0)
    with pytest.raises(ModelError, match=r"layer number 0 outside 1\.\.4"):
        megatron_shards(geometry(), MegatronCoord(1, 0, (0,), True, True, 128))
    with pytest.raises(ModelError, match="padded vocabulary 64 is smaller"):
        megatron_shards(geometry(), MegatronCoord(1, 0, (1,), True, True, 64))


def test_manifest_of_another_model_is_refused() -> None:
    shards = engine_shards(geometry(), 1, 0)
    shapes = {shard.name: shard.shape for shard in shards}
    with pytest.raises(ModelError, match=r"has no parameter model\.norm\.weight"):
        check_manifest(shards, {k: v for k, v in shapes.items() if k != "model.norm.weight"}, "engine")
    with pytest.raises(ModelError, match=r"shape \(64, 24\), its layout \(128, 24\)"):
        check_manifest(shards, {**shapes, "model.embed_tokens.weight": (64, 24)}, "engine")
    with pytest.raises(ModelError, match=r"parameter extra\.weight that no layout covers"):
        check_manifest(shards, {**shapes, "extra.weight": (1,)}, "engine")


def write_config(directory: Path, **changes: object) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 272,
        "max_position_embeddings": 512,
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))


def test_geometry_reads_both_spellings_of_rope(tmp_path: Path) -> None:
    write_config(tmp_path, rope_theta=5e5)
    assert ModelGeometry.from_hf(tmp_path).rope_theta == 5e5
    write_config(tmp_path, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    assert ModelGeometry.from_hf(tmp_path).rope_theta == 1e6
    llama3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    write_config(tmp_path, rope_scaling={**llama3, "original_max_position_embeddings": 8192})
    scaling = ModelGeometry.from_hf(tmp_path).rope_scaling
    assert scaling is not None and scaling.factor == 8 and scaling.original_max_position == 8192


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, "known: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type yarn is not supported"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3"),
        ({"quantization_config": {"bits": 4}}, "name the unquantised model"),
    ],
)
def test_unsupported_models_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    write_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        ModelGeometry.from_hf(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        ModelGeometry.from_hf(tmp_path)
    with pytest.raises(ModelError, match="download the model's weights"):
        read_shards(tmp_path, (), {})
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        read_shards(tmp_path, (), {})


def test_missing_and_short_tensors_are_named(tmp_path: Path) -> None:
    shards = engine_shards(geometry(), 1, 0)
    tensors = {shard.name: torch.zeros(shard.shape) for shard in shards}
    model = random_model(geometry(), seed=0)
    del model["model.norm.weight"]
    save_file(model, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor model\.norm\.weight"):
        read_shards(tmp_path, shards, tensors)
    model["model.norm.weight"] = torch.zeros(3)
    save_file(model, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(3,\)"):
        read_shards(tmp_path, shards, tensors)
