"""Llama 2 and 3, and whatever follows their architecture."""

from __future__ import annotations

from asyncrl.weights.family import Family, LayerTable
from asyncrl.weights.geometry import ModelGeometry
from asyncrl.weights.layer_parts import dense_mlp, gqa_attention


def layer(geometry: ModelGeometry, layer_idx: int) -> LayerTable:
    return gqa_attention(geometry) + dense_mlp(geometry)


FAMILY = Family("llama", "LlamaForCausalLM", layer)
