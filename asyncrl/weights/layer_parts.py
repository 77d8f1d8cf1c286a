"""Parts of a decoder layer that several families share: grouped-query attention, dense and expert MLPs.

Megatron's names are those of `GPTModel.named_parameters()` (`models/gpt/gpt_layer_specs.py`, local and
Transformer Engine specs; `transformer/moe/experts.py`), SGLang's those of its model files
(`models/llama.py`, `qwen3_moe.py`, `deepseek_v2.py`; `layers/quantization/unquant.py` for w13 and w2).
"""

from __future__ import annotations

from asyncrl.weights.family import Cut, LayerTable, Row
from asyncrl.weights.geometry import ModelGeometry

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def norm(hf: str, megatron: str, te: str = "") -> tuple[Row, Row]:
    """A norm that every rank holds: Megatron's row and SGLang's, whose name is Hugging Face's."""
    return Row(megatron, Cut.WHOLE, (hf,), te=te), Row(hf, Cut.WHOLE, (hf,))


def gqa_attention(geometry: ModelGeometry) -> LayerTable:
    """Grouped-query attention and the norm before it, with head norms and biases as the model has them."""
    hidden, dim = geometry.hidden_size, geometry.head_dim
    q_rows, kv_rows = geometry.num_heads * dim, geometry.num_kv_heads * dim
    rows = dict(zip(QKV, (q_rows, kv_rows, kv_rows), strict=True))
    norms = [
        norm(
            "input_layernorm.weight", "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"
        )
    ]
    tensors: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    tensors |= {f"{name}.weight": (size, hidden) for name, size in rows.items()}
    tensors["self_attn.o_proj.weight"] = (hidden, q_rows)
    kinds = ["weight"]
    if geometry.attention_bias:
        kinds.append("bias")
        tensors |= {f"{name}.bias": (size,) for name, size in rows.items()}
    if geometry.qk_norm:
        for part in ("q", "k"):
            tensors[f"self_attn.{part}_norm.weight"] = (dim,)
            norms.append(norm(f"self_attn.{part}_norm.weight", f"self_attention.{part}_layernorm.weight"))
    fused = [(kind, tuple(f"{name}.{kind}" for name in QKV)) for kind in kinds]
    out = ("self_attn.o_proj.weight",)
    return LayerTable(
        tensors,
        (
            *(row for row, _ in norms),
            *(Row(f"self_attention.linear_qkv.{kind}", Cut.GROUPED_QKV, parts) for kind, parts in fused),
            Row("self_attention.linear_proj.weight", Cut.COLS, out),
        ),
        (
            *(row for _, row in norms),
            *(Row(f"self_attn.qkv_proj.{kind}", Cut.QKV_HEADS, parts) for kind, parts in fused),
            Row(out[0], Cut.COLS, out),
        ),
    )


def dense_mlp(geometry: ModelGeometry) -> LayerTable:
    """A gated MLP and the norm before it, which Transformer Engine fuses into the first projection."""
    before = norm(
        "post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"
    )
    return LayerTable(
        {"post_attention_layernorm.weight": (geometry.hidden_size,)}, (before[0],), (before[1],)
    ) + _gated(geometry, "mlp.", "mlp.", geometry.ffn_hidden_size)


def moe_mlp(geometry: ModelGeometry) -> LayerTable:
    """Router, experts, shared experts, and the norm before them.

    w13 is [experts, gate rows then up rows, hidden], w2 [experts, hidden, columns]. The router's bias is a
    buffer on Megatron's side (`router.py`: expert_bias) and float32 on both.
    """
    moe, hidden = geometry.moe, geometry.hidden_size
    assert moe is not None
    expert = "mlp.experts.{expert}."
    gate, up, down = (f"{expert}{part}_proj.weight" for part in ("gate", "up", "down"))
    before = norm("post_attention_layernorm.weight", "pre_mlp_layernorm.weight")
    router, bias = "mlp.gate.weight", "mlp.gate.e_score_correction_bias"
    table = LayerTable(
        {
            "post_attention_layernorm.weight": (hidden,),
            router: (moe.num_experts, hidden),
            gate: (moe.expert_ffn, hidden),
            up: (moe.expert_ffn, hidden),
            down: (hidden, moe.expert_ffn),
        },
        (
            before[0],
            Row("mlp.router.weight", Cut.WHOLE, (router,)),
            *(
                Row(
                    f"mlp.experts.local_experts.{{expert}}.linear_{name}.weight",
                    cut,
                    parts,
                    grouped=f"mlp.experts.linear_{name}.weight{{expert}}",
                )
                for name, cut, parts in (("fc1", Cut.ROWS, (gate, up)), ("fc2", Cut.COLS, (down,)))
            ),
        ),
        (
            before[1],
            Row(router, Cut.WHOLE, (router,), never_fp8=True),
            Row("mlp.experts.w13_weight", Cut.ROWS, (gate, up)),
            Row("mlp.experts.w2_weight", Cut.COLS, (down,)),
        ),
    )
    if moe.has_bias:
        table += LayerTable(
            {bias: (moe.num_experts,)},
            (Row("mlp.router.expert_bias", Cut.WHOLE, (bias,), dtype="float32"),),
            (Row(bias, Cut.WHOLE, (bias,), dtype="float32"),),
        )
    if moe.shared_ffn:
        table += _gated(geometry, "mlp.shared_experts.", "mlp.shared_experts.", moe.shared_ffn)
    return table


def _gated(geometry: ModelGeometry, hf: str, megatron: str, ffn: int) -> LayerTable:
    """down(silu(gate(x)) * up(x)), its first two projections fused on both sides."""
    halves = (f"{hf}gate_proj.weight", f"{hf}up_proj.weight")
    down = f"{hf}down_proj.weight"
    return LayerTable(
        {**dict.fromkeys(halves, (ffn, geometry.hidden_size)), down: (geometry.hidden_size, ffn)},
        (
            Row(f"{megatron}linear_fc1.weight", Cut.ROWS, halves),
            Row(f"{megatron}linear_fc2.weight", Cut.COLS, (down,)),
        ),
        (Row(f"{hf}gate_up_proj.weight", Cut.ROWS, halves), Row(down, Cut.COLS, (down,))),
    )
