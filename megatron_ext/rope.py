"""Rotary tables: the cosine and sine of every packed entry's position, once per micro-batch."""

from __future__ import annotations

import math

import torch

from asyncrl.weights.geometry import Llama3Rope, ModelGeometry


def inverse_frequencies(geometry: ModelGeometry) -> torch.Tensor:
    """float32 [head_dim / 2]: theta^(-2 i / head_dim), stretched as the model's config says."""
    exponents = torch.arange(0, geometry.head_dim, 2, dtype=torch.int64).float() / geometry.head_dim
    frequencies = 1.0 / geometry.rope_theta**exponents
    if geometry.rope_scaling is None:
        return frequencies
    return _stretch_llama3(frequencies, geometry.rope_scaling)


def rotary_tables(frequencies: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin float32 [t, 1, head_dim] of int64 positions [t], both halves equal."""
    angles = torch.outer(positions.float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def _stretch_llama3(frequencies: torch.Tensor, rope: Llama3Rope) -> torch.Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies
