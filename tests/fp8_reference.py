"""What an engine of fp8 blocks must hold, in plain torch: codes of every matrix, and their scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.weights.layout import ShardLayout
from tests.shard_reference import Tensors
from tests.unit.reshard_reference import quantised


def fp8_tensors(plain: Tensors, shards: Sequence[ShardLayout]) -> Tensors:
    """One rank's parameters, ``plain`` where ``shards`` says so, else quantised; each matrix by itself."""
    held: Tensors = {}
    for shard in shards:
        if shard.name in plain and shard.dtype != "float8_e4m3fn":
            held[shard.name] = plain[shard.name]
        elif shard.name in plain:
            weight = plain[shard.name]
            parts = [quantised(part) for part in weight.reshape(-1, *weight.shape[-2:])]
            codes = torch.stack([codes for codes, _ in parts]).view(torch.float8_e4m3fn)
            scales = torch.stack([scales for _, scales in parts])
            held[shard.name] = codes.reshape(weight.shape)
            held[f"{shard.name}_scale_inv"] = scales.reshape(*weight.shape[:-2], *scales.shape[-2:])
    return held
