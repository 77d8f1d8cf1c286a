"""Qwen3, dense: Llama with a norm on every query and key head."""

from __future__ import annotations

from asyncrl.weights.family import Family, LayerTable
from asyncrl.weights.geometry import ModelGeometry
from asyncrl.weights.layer_parts import dense_mlp, gqa_attention


def layer(geometry: ModelGeometry, layer_idx: int) -> LayerTable:
    return gqa_attention(geometry) + dense_mlp(geometry)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", layer, qk_norm=True)
