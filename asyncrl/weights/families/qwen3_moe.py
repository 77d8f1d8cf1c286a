"""Qwen3 with experts: the attention of Qwen3, experts in every layer but those that config.json names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.weights.family import Family, LayerTable
from asyncrl.weights.geometry import ModelGeometry, MoeGeometry, required
from asyncrl.weights.layer_parts import dense_mlp, gqa_attention, moe_mlp


def layer(geometry: ModelGeometry, layer_idx: int) -> LayerTable:
    mlp = moe_mlp if geometry.is_moe_layer(layer_idx) else dense_mlp
    return gqa_attention(geometry) + mlp(geometry)


def read_moe(directory: Path, config: dict[str, Any]) -> MoeGeometry:
    """A layer has experts where its number, from 1, is a multiple of decoder_sparse_step."""
    step = int(config.get("decoder_sparse_step") or 1)
    named = set(config.get("mlp_only_layers") or ())
    layers = range(required(directory, config, "num_hidden_layers"))
    number = "num_experts" if "num_experts" in config else "num_local_experts"  # as transformers 5 writes it
    return MoeGeometry(
        num_experts=required(directory, config, number),
        expert_ffn=required(directory, config, "moe_intermediate_size"),
        shared_ffn=0,
        has_bias=False,
        dense_layers=frozenset(idx for idx in layers if idx in named or (idx + 1) % step),
    )


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", layer, qk_norm=True, read_moe=read_moe)
