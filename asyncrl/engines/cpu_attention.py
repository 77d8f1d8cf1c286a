"""One decode step of attention for a whole batch on a CPU, in a few torch operations.

SGLang's torch-native backend runs a dozen operations per sequence and layer. With 64 sequences that takes as
long as all the matrix products of a small model. Here sequences of similar length are padded to their
longest and attend together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention


def decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of the newest token of each sequence over all of its tokens.

    Args:
        query: [num_sequences, num_heads, head_dim].
        k_cache, v_cache: [num_locations, num_kv_heads, head_dim], and head_dim of the values.
        req_to_token: [num_rows, max_tokens]; the cache locations of a sequence stand in its row.
        rows: [num_sequences], each sequence's row.
        seq_lens: [num_sequences], tokens of each sequence, the newest included.
        scaling: factor on the scores; None for head_dim ** -0.5.

    Returns:
        [num_sequences, num_heads, head_dim of the values], dtype of ``query``.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = k_cache.shape[1]
    output = query.new_empty(len(query), num_heads, v_cache.shape[-1])
    for members in _similar_lengths(seq_lens.tolist()):
        lengths = seq_lens[members]
        visible = torch.arange(int(lengths.max())) < lengths[:, None]
        # A row holds anything beyond its sequence; the mask hides location 0, which always exists.
        locations = torch.where(visible, req_to_token[rows[members], : visible.shape[1]], 0)
        keys, values = (_gather(cache, locations, query.dtype) for cache in (k_cache, v_cache))
        # The query heads of a group see the same keys, so they can be the "positions" of one head.
        grouped = query[members].view(len(members), num_kv_heads, -1, head_dim)
        attended = scaled_dot_product_attention(
            grouped, keys, values, attn_mask=visible[:, None, None, :], scale=scaling
        )
        output[members] = attended.reshape(len(members), num_heads, -1)
    return output


def _gather(cache: torch.Tensor, locations: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[num_sequences, num_kv_heads, length, head_dim] of a cache; `index_select` is thrice as fast as []."""
    rows = cache.flatten(1).index_select(0, locations.flatten())
    return rows.view(*locations.shape, *cache.shape[1:]).transpose(1, 2).to(dtype)


def _similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences whose lengths share a power of two above them, so padding at most doubles."""
    buckets: dict[int, list[int]] = defaultdict(list)
    for index, length in enumerate(lengths):
        buckets[(length - 1).bit_length()].append(index)
    return list(buckets.values())
