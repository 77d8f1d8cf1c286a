"""Core attention over packed segments, with context parallelism, for megatron's local layer spec.

megatron's own local attention refuses both. Here, per layer:

    q, k, v [t, heads, d] -> rotate by position -> (CP) all-gather k, v, put into segment order
                          -> one causal attention per span -> [t, heads * d]

A *span* is a run of queries of one segment: all of them without context parallelism, one of the rank's two
zigzag chunks with it. Its keys are the prefix that the segment continues, if any, and the segment up to the
span's end; the queries are the last of its keys, so the mask is a lower triangle aligned at the end. Rotation
happens here rather than in megatron, because one gather by position replaces its loop over segments, and the
same code serves shared prefixes and every CP rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from megatron_ext.packing import Segment, zigzag_indices


@dataclass(frozen=True, slots=True)
class Span:
    """Queries, and their keys: the first ``num_prefix`` of one segment, then ``num_keys`` of another."""

    num_queries: int
    segment: int
    num_keys: int
    prefix: int = 0
    num_prefix: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(queries, keys)."""
        return self.num_queries, self.num_prefix + self.num_keys


@dataclass
class PackedParams(PackedSeqParams):
    """What every layer needs to know of a micro-batch; megatron hands it through to `PackedAttention`."""

    cos: torch.Tensor | None = None  # [t, 1, d], of this rank's entries
    sin: torch.Tensor | None = None
    spans: tuple[Span, ...] = ()  # of this rank's entries, in their order
    segment_sizes: tuple[int, ...] = ()  # padded entries of every segment
    key_order: torch.Tensor | None = None  # int64 [total], see `gathered_key_order`; None without CP
    # bool [queries, keys] by shape, for spans that are not plainly causal
    masks: Mapping[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    scored: torch.Tensor | None = None  # int64 [m], local entries whose label the last stage scores
    labels: torch.Tensor | None = None  # int64 [m], those labels
    temperature: float = 1.0  # logits are divided by it


def make_spans(segments: Sequence[Segment], cp_size: int, cp_rank: int) -> tuple[Span, ...]:
    """The spans of one rank, in its local order of entries."""
    spans = []
    for idx, segment in enumerate(segments):
        size = segment.stop - segment.start
        prefix = segment.prefix or 0
        if cp_size == 1:
            spans.append(Span(size, idx, size, prefix, segment.num_before))
            continue
        chunk = size // (2 * cp_size)
        for chunk_idx in (cp_rank, 2 * cp_size - 1 - cp_rank):
            spans.append(Span(chunk, idx, (chunk_idx + 1) * chunk, prefix, segment.num_before))
    return tuple(spans)


def make_masks(spans: Sequence[Span], device: torch.device) -> dict[tuple[int, int], torch.Tensor]:
    """Per shape with more keys than queries, True where query i may see key j.

    The queries are the last of the keys.
    """
    shapes = {span.shape for span in spans if span.shape[0] != span.shape[1]}
    return {
        (rows, cols): torch.ones(rows, cols, dtype=torch.bool, device=device).tril(cols - rows)
        for rows, cols in shapes
    }


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
        # Split once: the gradient of many slices would be many full-size tensors.
        queries = query.split([span.num_queries for span in packed.spans])
        keys, values = key.split(packed.segment_sizes), value.split(packed.segment_sizes)
        return torch.cat(
            [
                self._attend(own, _of_span(span, keys), _of_span(span, values), packed.masks.get(span.shape))
                for span, own in zip(packed.spans, queries, strict=True)
            ]
        )

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        out = scaled_dot_product_attention(
            *(heads.transpose(0, 1).unsqueeze(0) for heads in (query, key, value)),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return out.squeeze(0).transpose(0, 1).reshape(query.size(0), -1)


def _of_span(span: Span, by_segment: Sequence[torch.Tensor]) -> torch.Tensor:
    """The keys (or values) that a span sees, [num_prefix + num_keys, heads, d]."""
    own = by_segment[span.segment][: span.num_keys]
    if not span.num_prefix:
        return own
    return torch.cat((by_segment[span.prefix][: span.num_prefix], own))


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
