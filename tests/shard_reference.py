"""What every rank must hold, computed from whole tensors by plain torch: no layout code is used here.

A random model is a dictionary of Hugging Face tensors; `megatron_tensors` and `engine_tensors` cut it the way
Megatron-core and SGLang do, by reshape, chunk and cat.
"""

from __future__ import annotations

import torch

from asyncrl.weights.geometry import ModelGeometry
from tests.moe_reference import (
    ExpertCut,
    engine_experts,
    engine_mla,
    megatron_experts,
    megatron_mla,
    mla_of,
    moe_of,
    random_attention,
    random_experts,
)

Tensors = dict[str, torch.Tensor]
NO_EXPERTS = ExpertCut()


def geometry(family: str = "llama", **changes: object) -> ModelGeometry:
    """A small model of one family; vocabulary and sizes are uneven on purpose."""
    fields: dict[str, object] = {
        "family": family.removesuffix("_no_q_lora"),
        "num_layers": 4,
        "hidden_size": 24,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 6,
        "ffn_hidden_size": 40,
        "vocab_size": 101,
        "tied_embeddings": family == "llama",
        "qk_norm": family in ("qwen3", "qwen3_moe"),
        "attention_bias": family == "qwen2",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "norm_eps": 1e-6,
        "max_position": 128,
        "moe": moe_of(family),
        "mla": mla_of(family),
    }
    return ModelGeometry(**{**fields, **changes})  # type: ignore[arg-type]


def random_model(g: ModelGeometry, seed: int) -> Tensors:
    """Random float32 tensors under Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q_rows, kv_rows = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    model = {"model.embed_tokens.weight": random(g.vocab_size, g.hidden_size)}
    for idx in range(g.num_layers):
        at = f"model.layers.{idx}."
        if g.mla:
            model |= {at + name: tensor for name, tensor in random_attention(g, generator).items()}
        else:
            for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                model[f"{at}self_attn.{part}_proj.weight"] = random(rows, g.hidden_size)
                if g.attention_bias:
                    model[f"{at}self_attn.{part}_proj.bias"] = random(rows)
            model[f"{at}self_attn.o_proj.weight"] = random(g.hidden_size, q_rows)
        if g.qk_norm:
            model[f"{at}self_attn.q_norm.weight"] = random(g.head_dim)
            model[f"{at}self_attn.k_norm.weight"] = random(g.head_dim)
        if g.moe and idx not in g.moe.dense_layers:
            model |= {at + name: tensor for name, tensor in random_experts(g, generator).items()}
        else:
            model[f"{at}mlp.gate_proj.weight"] = random(g.ffn_hidden_size, g.hidden_size)
            model[f"{at}mlp.up_proj.weight"] = random(g.ffn_hidden_size, g.hidden_size)
            model[f"{at}mlp.down_proj.weight"] = random(g.hidden_size, g.ffn_hidden_size)
        model[f"{at}input_layernorm.weight"] = random(g.hidden_size)
        model[f"{at}post_attention_layernorm.weight"] = random(g.hidden_size)
    model["model.norm.weight"] = random(g.hidden_size)
    if not g.tied_embeddings:
        model["lm_head.weight"] = random(g.vocab_size, g.hidden_size)
    return model


def _part(tensor: torch.Tensor, parts: int, idx: int, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(parts, dim)[idx].contiguous()


def _vocabulary(tensor: torch.Tensor, padded: int, parts: int, idx: int) -> torch.Tensor:
    missing = padded - tensor.shape[0]
    return _part(torch.nn.functional.pad(tensor, (0, 0, 0, missing)), parts, idx)


def _within(model: Tensors, at: str) -> Tensors:
    return {name.removeprefix(at): tensor for name, tensor in model.items() if name.startswith(at)}


def megatron_tensors(
    g: ModelGeometry,
    model: Tensors,
    tp_size: int,
    tp_rank: int,
    layers: tuple[int, ...],
    has_embedding: bool,
    has_output: bool,
    padded_vocab: int,
    experts: ExpertCut = NO_EXPERTS,
) -> Tensors:
    """One model chunk's parameters; ``layers`` counts from 0."""
    held: Tensors = {}
    embedding = model["model.embed_tokens.weight"]
    if has_embedding:
        held["embedding.word_embeddings.weight"] = _vocabulary(embedding, padded_vocab, tp_size, tp_rank)
    for local_idx, idx in enumerate(layers):
        layer = _within(model, f"model.layers.{idx}.")
        mine = _megatron_layer(g, layer, tp_size, tp_rank, experts)
        held |= {f"decoder.layers.{local_idx}.{name}": tensor for name, tensor in mine.items()}
    if has_output:
        held["decoder.final_layernorm.weight"] = model["model.norm.weight"].clone()
        head = embedding if g.tied_embeddings else model["lm_head.weight"]
        if not (g.tied_embeddings and has_embedding):
            held["output_layer.weight"] = _vocabulary(head, padded_vocab, tp_size, tp_rank)
    return held


def _megatron_layer(
    g: ModelGeometry, layer: Tensors, tp_size: int, tp_rank: int, experts: ExpertCut
) -> Tensors:
    held: Tensors = {}
    names = {"input": "input_layernorm.weight", "mlp": "pre_mlp_layernorm.weight"}
    if g.mla:
        held |= megatron_mla(layer, tp_size, tp_rank, experts.te)
    else:
        if experts.te:
            names["input"] = "self_attention.linear_qkv.layer_norm_weight"
        for kind in ("weight", "bias") if g.attention_bias else ("weight",):
            q, k, v = (layer[f"self_attn.{part}_proj.{kind}"] for part in "qkv")
            groups = [part.reshape(g.num_kv_heads, -1, *part.shape[1:]) for part in (q, k, v)]
            fused = torch.cat(groups, 1).reshape(-1, *q.shape[1:])
            held[f"self_attention.linear_qkv.{kind}"] = _part(fused, tp_size, tp_rank)
        out = layer["self_attn.o_proj.weight"]
        held["self_attention.linear_proj.weight"] = _part(out, tp_size, tp_rank, 1)
    if g.qk_norm:
        held["self_attention.q_layernorm.weight"] = layer["self_attn.q_norm.weight"].clone()
        held["self_attention.k_layernorm.weight"] = layer["self_attn.k_norm.weight"].clone()
    if "mlp.gate.weight" in layer:
        held |= megatron_experts(layer, g, tp_size, tp_rank, experts)
    else:
        halves = [_part(layer[f"mlp.{half}_proj.weight"], tp_size, tp_rank) for half in ("gate", "up")]
        held["mlp.linear_fc1.weight"] = torch.cat(halves)
        held["mlp.linear_fc2.weight"] = _part(layer["mlp.down_proj.weight"], tp_size, tp_rank, 1)
        if experts.te:
            names["mlp"] = "mlp.linear_fc1.layer_norm_weight"
    held[names["input"]] = layer["input_layernorm.weight"].clone()
    held[names["mlp"]] = layer["post_attention_layernorm.weight"].clone()
    return held


def engine_tensors(g: ModelGeometry, model: Tensors, tp_size: int, tp_rank: int, ep_size: int = 1) -> Tensors:
    """One SGLang rank's parameters."""
    padded = -(-g.vocab_size // 64) * 64
    if padded % tp_size:
        padded = -(-g.vocab_size // (64 * tp_size)) * 64 * tp_size
    held: Tensors = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in model:
            held[name] = _vocabulary(model[name], padded, tp_size, tp_rank)
    for idx in range(g.num_layers):
        at = f"model.layers.{idx}."
        mine = _engine_layer(g, _within(model, at), tp_size, tp_rank, ep_size)
        held |= {at + name: tensor for name, tensor in mine.items()}
    held["model.norm.weight"] = model["model.norm.weight"].clone()
    return held


def _engine_layer(g: ModelGeometry, layer: Tensors, tp_size: int, tp_rank: int, ep_size: int) -> Tensors:
    held: Tensors = {}
    if g.mla:
        held |= engine_mla(layer, tp_size, tp_rank)
    else:
        for kind in ("weight", "bias") if g.attention_bias else ("weight",):
            q, k, v = (layer[f"self_attn.{part}_proj.{kind}"] for part in "qkv")
            if tp_size > g.num_kv_heads:  # every key/value head, once per rank that shares it
                k, v = (
                    part.reshape(g.num_kv_heads, -1).repeat_interleave(tp_size // g.num_kv_heads, 0)
                    for part in (k, v)
                )
                k, v = (part.reshape(-1, *q.shape[1:]) for part in (k, v))
            local = [_part(part, tp_size, tp_rank) for part in (q, k, v)]
            held[f"self_attn.qkv_proj.{kind}"] = torch.cat(local)
        held["self_attn.o_proj.weight"] = _part(layer["self_attn.o_proj.weight"], tp_size, tp_rank, 1)
    if "mlp.gate.weight" in layer:
        held |= engine_experts(layer, g, tp_size, tp_rank, ep_size)
    else:
        halves = [_part(layer[f"mlp.{half}_proj.weight"], tp_size, tp_rank) for half in ("gate", "up")]
        held["mlp.gate_up_proj.weight"] = torch.cat(halves)
        held["mlp.down_proj.weight"] = _part(layer["mlp.down_proj.weight"], tp_size, tp_rank, 1)
    names = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    if g.qk_norm:
        names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    return held | {name: layer[name].clone() for name in names}


def first_difference(actual: Tensors, expected: Tensors) -> str:
    """Empty where both hold the same bits; otherwise the first parameter and element that differ."""
    if actual.keys() != expected.keys():
        return f"names differ: {sorted(actual.keys() ^ expected.keys())[:4]}"
    for name, wanted in expected.items():
        got = actual[name]
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            return f"{name}: {tuple(got.shape)} {got.dtype}, expected {tuple(wanted.shape)} {wanted.dtype}"
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[wanted.element_size()]
        wrong = (got.view(width) != wanted.view(width)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            return f"{name}{list(at)}: {got[at]} expected {wanted[at]} ({len(wrong)} elements differ)"
    return ""
