"""Core attention over packed segments, with context parallelism, for megatron's local layer spec.

megatron's own local attention refuses both. Here, per layer:

    q, k, v [t, heads, d] -> rotate by position -> (CP) all-gather k, v, put into segment order
                          -> one causal attention per span -> [t, heads * d]

A *span* is a run of one segment's queries together with all keys up to its end: the whole segment without
context parallelism, one of the rank's two zigzag chunks with it. Queries are the last of a span's keys, so
its mask is the lower triangle aligned at the end. Rotation happens here rather than in megatron, because
one gather by position replaces its loop over segments, and the same code serves every CP rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from megatron_ext.packing import zigzag_indices


@dataclass(frozen=True, slots=True)
class Span:
    """Queries [query, query + num_queries) of this rank, keys [key, key + num_keys) in segment order."""

    query: int
    num_queries: int
    key: int
    num_keys: int


@dataclass
class PackedParams(PackedSeqParams):
    """What every layer needs to know of a micro-batch; megatron hands it through to `PackedAttention`."""

    cos: torch.Tensor | None = None  # [t, 1, d], of this rank's entries
    sin: torch.Tensor | None = None
    spans: tuple[Span, ...] = ()
    key_order: torch.Tensor | None = None  # int64 [total], see `gathered_key_order`; None without CP
    scored: torch.Tensor | None = None  # int64 [m], local entries whose label the last stage scores
    labels: torch.Tensor | None = None  # int64 [m], those labels
    temperature: float = 1.0  # logits are divided by it


def make_spans(cu_seqlens: Sequence[int], cp_size: int, cp_rank: int) -> tuple[Span, ...]:
    """The spans of one rank, in its local order of entries."""
    spans = []
    query = 0
    for start, stop in pairwise(cu_seqlens):
        if cp_size == 1:
            spans.append(Span(start, stop - start, start, stop - start))
            continue
        chunk = (stop - start) // (2 * cp_size)
        for chunk_idx in (cp_rank, 2 * cp_size - 1 - cp_rank):
            spans.append(Span(query, chunk, start, (chunk_idx + 1) * chunk))
            query += chunk
    return tuple(spans)


def gathered_key_order(cu_seqlens: Sequence[int], cp_size: int) -> torch.Tensor:
    """For each entry in segment order, its index in the rank-major concatenation of all ranks' parts."""
    rank_major = torch.cat([zigzag_indices(cu_seqlens, cp_size, rank) for rank in range(cp_size)])
    return torch.argsort(rank_major)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding in the half-split form of the Llama family.

    heads [t, n, d]; cos, sin [t, 1, d], both halves equal -> [t, n, d]. Su et al., arXiv 2104.09864.
    """
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


class PackedAttention(MegatronModule):
    """Causal grouped-query attention over packed segments; drop-in for a layer spec's ``core_attention``."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        **_options: Any,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError(f"attention_dropout = {config.attention_dropout}; packed attention has none")
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: PackedParams,
        **_options: Any,
    ) -> torch.Tensor:
        """query [t, n, d]; key, value [t, kv, d], kv divides n -> [t, n * d]."""
        packed = packed_seq_params
        cos, sin = packed.cos.to(query.dtype), packed.sin.to(query.dtype)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if packed.key_order is not None:
            both = _GatherEntries.apply(torch.stack((key, value), dim=1), mpu.get_context_parallel_group())
            key, value = both.index_select(0, packed.key_order).unbind(1)
        return torch.cat([self._attend(span, query, key, value) for span in packed.spans])

    def _attend(
        self, span: Span, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        queries = query[span.query : span.query + span.num_queries]
        keys, values = (heads[span.key : span.key + span.num_keys] for heads in (key, value))
        whole = span.num_queries == span.num_keys
        out = scaled_dot_product_attention(
            *(heads.transpose(0, 1).unsqueeze(0) for heads in (queries, keys, values)),
            attn_mask=None if whole else _lower_right(span.num_queries, span.num_keys, query.device),
            is_causal=whole,
            scale=self._scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return out.squeeze(0).transpose(0, 1).reshape(span.num_queries, -1)


def _lower_right(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """bool [num_queries, num_keys], True where query i may see key j: the queries are the last keys."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


class _GatherEntries(torch.autograd.Function):
    """[t, ...] of every context-parallel rank -> [cp * t, ...], rank-major; backward sums and scatters."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        local = local.contiguous()
        out = local.new_empty(group.size() * local.size(0), *local.shape[1:])
        dist.all_gather_into_tensor(out, local, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        out = grad.new_empty(grad.size(0) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad, group=ctx.group)
        return out, None
