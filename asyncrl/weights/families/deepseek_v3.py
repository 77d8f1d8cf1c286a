"""DeepSeek-V3, R1 and Kimi-K2: latent attention, dense first layers, shared experts, a bias per expert.

The kv_b projection is one parameter of the engine; w_kc and w_vc are derived from it and recomputed there.
Rotary dimensions keep Hugging Face's interleaved order on both sides. The layer for multi-token prediction,
the last one of the checkpoint, belongs to neither side and is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.weights.family import Cut, Family, LayerTable, Row
from asyncrl.weights.geometry import MlaGeometry, ModelError, ModelGeometry, MoeGeometry, required
from asyncrl.weights.layer_parts import dense_mlp, moe_mlp, norm

A, M = "self_attn.", "self_attention."
KV_A, KV_B, OUT = f"{A}kv_a_proj_with_mqa.weight", f"{A}kv_b_proj.weight", f"{A}o_proj.weight"
Q, Q_A, Q_B = f"{A}q_proj.weight", f"{A}q_a_proj.weight", f"{A}q_b_proj.weight"
Q_NORM, KV_NORM, IN_NORM = f"{A}q_a_layernorm.weight", f"{A}kv_a_layernorm.weight", "input_layernorm.weight"


def layer(geometry: ModelGeometry, layer_idx: int) -> LayerTable:
    mlp = moe_mlp if geometry.is_moe_layer(layer_idx) else dense_mlp
    return _key_value(geometry) + _query(geometry) + mlp(geometry)


def _key_value(geometry: ModelGeometry) -> LayerTable:
    """What is the same with and without a low-rank query; the down projection is whole in TE modules."""
    mla, hidden, heads = geometry.mla, geometry.hidden_size, geometry.num_heads
    assert mla is not None
    before = norm(IN_NORM, IN_NORM)
    kv_norm = norm(KV_NORM, f"{M}kv_layernorm.weight", f"{M}linear_kv_up_proj.layer_norm_weight")
    return LayerTable(
        {
            IN_NORM: (hidden,),
            KV_A: (mla.kv_rank + mla.rope_dim, hidden),
            KV_NORM: (mla.kv_rank,),
            KV_B: (heads * (mla.nope_dim + mla.v_dim), mla.kv_rank),
            OUT: (hidden, heads * mla.v_dim),
        },
        (
            before[0],
            Row(f"{M}linear_kv_down_proj.weight", Cut.ROWS, (KV_A,), te_cut=Cut.WHOLE),
            kv_norm[0],
            Row(f"{M}linear_kv_up_proj.weight", Cut.ROWS, (KV_B,)),
            Row(f"{M}linear_proj.weight", Cut.COLS, (OUT,)),
        ),
        (before[1], kv_norm[1], Row(KV_B, Cut.ROWS, (KV_B,)), Row(OUT, Cut.COLS, (OUT,))),
    )


def _query(geometry: ModelGeometry) -> LayerTable:
    mla, hidden = geometry.mla, geometry.hidden_size
    assert mla is not None
    rows = geometry.num_heads * (mla.nope_dim + mla.rope_dim)
    if not mla.q_rank:
        return LayerTable(
            {Q: (rows, hidden)},
            (Row(f"{M}linear_q_proj.weight", Cut.ROWS, (Q,)),),
            (Row(Q, Cut.ROWS, (Q,)), Row(KV_A, Cut.WHOLE, (KV_A,))),
        )
    q_norm = norm(Q_NORM, f"{M}q_layernorm.weight", f"{M}linear_q_up_proj.layer_norm_weight")
    fused = Row(f"{A}fused_qkv_a_proj_with_mqa.weight", Cut.WHOLE, (Q_A, KV_A))
    return LayerTable(
        {Q_A: (mla.q_rank, hidden), Q_NORM: (mla.q_rank,), Q_B: (rows, mla.q_rank)},
        (
            Row(f"{M}linear_q_down_proj.weight", Cut.ROWS, (Q_A,), te_cut=Cut.WHOLE),
            q_norm[0],
            Row(f"{M}linear_q_up_proj.weight", Cut.ROWS, (Q_B,)),
        ),
        (fused, q_norm[1], Row(Q_B, Cut.ROWS, (Q_B,))),
    )


def read_mla(directory: Path, config: dict[str, Any]) -> MlaGeometry:
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return MlaGeometry(config.get("q_lora_rank") or 0, *(required(directory, config, key) for key in sizes))


def read_moe(directory: Path, config: dict[str, Any]) -> MoeGeometry:
    """The first layers are dense, and of the others every moe_layer_freq-th has experts."""
    first, every = required(directory, config, "first_k_dense_replace"), config.get("moe_layer_freq") or 1
    if config.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ModelError(f"{directory}: topk_method {config['topk_method']} is not supported")
    expert_ffn = required(directory, config, "moe_intermediate_size")
    layers = range(required(directory, config, "num_hidden_layers"))
    return MoeGeometry(
        num_experts=required(directory, config, "n_routed_experts"),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * int(config.get("n_shared_experts") or 0),
        has_bias=True,
        dense_layers=frozenset(idx for idx in layers if idx < first or idx % every),
    )


FAMILY = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", layer, rope_is_its_own=True, read_moe=read_moe, read_mla=read_mla
)
