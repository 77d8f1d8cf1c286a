"""Qwen2 and Qwen2.5, dense: Llama with a bias on q, k and v."""

from __future__ import annotations

from asyncrl.weights.family import Family, LayerTable
from asyncrl.weights.geometry import ModelGeometry
from asyncrl.weights.layer_parts import dense_mlp, gqa_attention


def layer(geometry: ModelGeometry, layer_idx: int) -> LayerTable:
    return gqa_attention(geometry) + dense_mlp(geometry)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", layer, qkv_bias=True)
