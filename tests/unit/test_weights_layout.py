"""Layouts of both sides against shards cut from whole tensors by plain torch."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.weights.engine_layout import check_manifest, engine_shards, padded_vocab
from asyncrl.weights.geometry import MlaGeometry, ModelError, ModelGeometry, MoeGeometry
from asyncrl.weights.hf import read_shards
from asyncrl.weights.layout import ShardLayout, hf_tensors
from asyncrl.weights.megatron_layout import MegatronCoord, megatron_shards
from tests.moe_reference import ExpertCut
from tests.shard_reference import (
    Tensors,
    engine_tensors,
    first_difference,
    geometry,
    megatron_tensors,
    random_model,
)

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v3_no_q_lora")


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


@pytest.mark.parametrize(
    "cut", [(4, 1, False, False), (2, 2, True, True), (1, 4, True, False), (8, 1, False, True)]
)
def test_megatron_experts_and_names(
    family: tuple[str, Path, Tensors], cut: tuple[int, int, bool, bool]
) -> None:
    name, directory, model = family
    ep_size, etp_size, te, grouped = cut
    for ep_rank, etp_rank in itertools.product(range(ep_size), range(etp_size)):
        coord = MegatronCoord(
            *(2, 1, (2, 1), False, True, 128, ep_size, ep_rank, etp_size, etp_rank),
            transformer_engine=te,
            grouped_experts=grouped,
        )
        actual = fill(megatron_shards(geometry(name), coord), directory)
        experts = ExpertCut(ep_size, ep_rank, etp_size, etp_rank, te, grouped)
        expected = megatron_tensors(geometry(name), model, 2, 1, (1, 0), False, True, 128, experts)
        assert first_difference(actual, expected) == "", coord


@pytest.mark.parametrize(("tp_size", "ep_size"), [(1, 1), (2, 1), (2, 2), (4, 2), (8, 1), (8, 2), (8, 8)])
def test_engine_shards(family: tuple[str, Path, Tensors], tp_size: int, ep_size: int) -> None:
    name, directory, model = family
    for tp_rank in range(tp_size):
        shards = engine_shards(geometry(name), tp_size, tp_rank, ep_size)
        expected = engine_tensors(geometry(name), model, tp_size, tp_rank, ep_size)
        assert first_difference(fill(shards, directory), expected) == "", tp_rank
        check_manifest(shards, {key: tuple(value.shape) for key, value in expected.items()}, "engine")


def test_the_bias_of_experts_stays_float32() -> None:
    g = geometry("deepseek_v3")
    coord = MegatronCoord(1, 0, (2,), False, False, 128)
    for shards in (megatron_shards(g, coord), engine_shards(g, 1, 0)):
        fixed = {shard.name.split(".")[-1]: shard.dtype for shard in shards if shard.dtype}
        assert list(fixed.values()) == ["float32"] and "bias" in next(iter(fixed))


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
    with pytest.raises(ModelError, match="attention heads: 8 cannot be cut into 3 equal parts"):
        engine_shards(geometry(), 3, 0)
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.gate_proj\.weight: 40 cannot be cut into 3 equal"):
        engine_shards(geometry(num_heads=6, num_kv_heads=3), 3, 0)
    with pytest.raises(ModelError, match="16 cannot be cut into 3 equal parts"):
        megatron_shards(geometry("qwen3_moe"), MegatronCoord(1, 0, (1,), True, True, 128, ep_size=3))
    with pytest.raises(ModelError, match="ep 3 does not divide its tp 4"):
        engine_shards(geometry("qwen3_moe"), 4, 0, ep_size=3)
    with pytest.raises(ModelError, match="expert-parallel rank 2 of 2"):
        megatron_shards(geometry("qwen3_moe"), MegatronCoord(1, 0, (1,), True, True, 128, 2, 2))
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


def test_geometry_reads_experts(tmp_path: Path) -> None:
    experts = {
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    write_config(tmp_path, architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=6, **experts)
    g = ModelGeometry.from_hf(tmp_path)
    assert g.moe == MoeGeometry(8, 32, 0, has_bias=False, dense_layers=frozenset({0, 2, 3, 4}))
    assert g.qk_norm and g.mla is None and "experts" in g.untrainable


def test_geometry_reads_latent_attention(tmp_path: Path) -> None:
    sizes = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    experts = {"n_routed_experts": 8, "moe_intermediate_size": 32, "n_shared_experts": 2}
    config = {
        **sizes,
        **experts,
        "v_head_dim": 6,
        "first_k_dense_replace": 1,
        "rope_scaling": {"type": "yarn"},
    }
    write_config(tmp_path, architectures=["DeepseekV3ForCausalLM"], **config)
    g = ModelGeometry.from_hf(tmp_path)
    assert g.mla == MlaGeometry(0, 16, 8, 4, 6)
    assert g.moe == MoeGeometry(8, 32, 64, has_bias=True, dense_layers=frozenset({0}))
    write_config(tmp_path, architectures=["DeepseekV3ForCausalLM"], **{**config, "kv_lora_rank": None})
    with pytest.raises(ModelError, match="kv_lora_rank is missing"):
        ModelGeometry.from_hf(tmp_path)


def test_fp8_checkpoints_give_their_sizes_only(tmp_path: Path) -> None:
    write_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert ModelGeometry.from_hf(tmp_path, allow_fp8=True).num_layers == 2
    with pytest.raises(ModelError, match="name the unquantised model"):
        ModelGeometry.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, "known: DeepseekV3ForCausalLM, LlamaForCausalLM, Qwen2"),
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
