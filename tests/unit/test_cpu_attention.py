"""Batched decode attention equals attention of one sequence at a time, written out."""

from __future__ import annotations

import pytest
import torch

from asyncrl.engines.cpu_attention import decode_attention


@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [1, 2, 3, 17, 64, 65, 100]])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_equals_one_sequence_at_a_time(
    lengths: list[int], num_heads: int, num_kv_heads: int, scaling: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    head_dim, value_dim, num_locations = 8, 8, 512
    k_cache = torch.randn(num_locations, num_kv_heads, head_dim, generator=generator)
    v_cache = torch.randn(num_locations, num_kv_heads, value_dim, generator=generator)
    query = torch.randn(len(lengths), num_heads, head_dim, generator=generator)
    # Beyond a sequence's length its row holds garbage, even locations that do not exist.
    req_to_token = torch.full((16, 128), 10**6, dtype=torch.int32)
    rows = torch.randperm(16, generator=generator)[: len(lengths)]
    free = torch.randperm(num_locations, generator=generator)
    taken = 0
    for row, length in zip(rows.tolist(), lengths, strict=True):
        req_to_token[row, :length] = free[taken : taken + length]
        taken += length

    actual = decode_attention(query, k_cache, v_cache, req_to_token, rows, torch.tensor(lengths), scaling)

    for index, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        locations = req_to_token[row, :length].long()
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = k_cache[locations, kv_head] @ query[index, head]
            weights = torch.softmax(scores * (head_dim**-0.5 if scaling is None else scaling), 0)
            expected = weights @ v_cache[locations, kv_head]
            assert torch.allclose(actual[index, head], expected, atol=1e-5), f"sequence {index}, head {head}"
