"""Experts and latent attention, cut from whole tensors by plain torch: no layout code is used here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.weights.geometry import MlaGeometry, ModelGeometry, MoeGeometry

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ExpertCut:
    """How a trainer rank holds experts, and how its modules are named."""

    ep_size: int = 1
    ep_rank: int = 0
    etp_size: int = 1
    etp_rank: int = 0
    te: bool = False
    grouped: bool = False


def moe_of(family: str) -> MoeGeometry | None:
    if family == "qwen3_moe":
        return MoeGeometry(16, 24, 0, has_bias=False, dense_layers=frozenset())
    if family.startswith("deepseek_v3"):
        return MoeGeometry(16, 24, 48, has_bias=True, dense_layers=frozenset({0}))
    return None


def mla_of(family: str) -> MlaGeometry | None:
    if not family.startswith("deepseek_v3"):
        return None
    return MlaGeometry(0 if family.endswith("no_q_lora") else 16, 16, 6, 8, 10)


def random_attention(g: ModelGeometry, random: torch.Generator) -> Tensors:
    """Latent attention of one layer, under Hugging Face names."""
    m = g.mla
    assert m is not None

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    q_rows = g.num_heads * (m.nope_dim + m.rope_dim)
    held = {
        "kv_a_proj_with_mqa.weight": draw(m.kv_rank + m.rope_dim, g.hidden_size),
        "kv_a_layernorm.weight": draw(m.kv_rank),
        "kv_b_proj.weight": draw(g.num_heads * (m.nope_dim + m.v_dim), m.kv_rank),
        "o_proj.weight": draw(g.hidden_size, g.num_heads * m.v_dim),
    }
    if m.q_rank:
        held["q_a_proj.weight"] = draw(m.q_rank, g.hidden_size)
        held["q_a_layernorm.weight"] = draw(m.q_rank)
        held["q_b_proj.weight"] = draw(q_rows, m.q_rank)
    else:
        held["q_proj.weight"] = draw(q_rows, g.hidden_size)
    return {f"self_attn.{name}": tensor for name, tensor in held.items()}


def random_experts(g: ModelGeometry, random: torch.Generator) -> Tensors:
    m = g.moe
    assert m is not None
    held = {"mlp.gate.weight": torch.randn(m.num_experts, g.hidden_size, generator=random)}
    if m.has_bias:
        held["mlp.gate.e_score_correction_bias"] = torch.randn(m.num_experts, generator=random)
    owners = [(f"mlp.experts.{expert}.", m.expert_ffn) for expert in range(m.num_experts)]
    if m.shared_ffn:
        owners.append(("mlp.shared_experts.", m.shared_ffn))
    for at, ffn in owners:
        held[f"{at}gate_proj.weight"] = torch.randn(ffn, g.hidden_size, generator=random)
        held[f"{at}up_proj.weight"] = torch.randn(ffn, g.hidden_size, generator=random)
        held[f"{at}down_proj.weight"] = torch.randn(g.hidden_size, ffn, generator=random)
    return held


def part(tensor: torch.Tensor, parts: int, idx: int, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(parts, dim)[idx].contiguous()


def gate_up(layer: Tensors, at: str, size: int, rank: int) -> torch.Tensor:
    return torch.cat([part(layer[f"{at}{half}_proj.weight"], size, rank) for half in ("gate", "up")])


def megatron_mla(layer: Tensors, size: int, rank: int, te: bool) -> Tensors:
    """Latent attention of one Megatron rank; ``layer`` holds Hugging Face names within the layer."""
    attention = {name.removeprefix("self_attn."): tensor for name, tensor in layer.items()}
    held = {
        "linear_kv_up_proj.weight": part(attention["kv_b_proj.weight"], size, rank),
        "linear_proj.weight": part(attention["o_proj.weight"], size, rank, 1),
    }
    downs = {"linear_kv_down_proj.weight": attention["kv_a_proj_with_mqa.weight"]}
    norms = {"kv": attention["kv_a_layernorm.weight"]}
    if "q_proj.weight" in attention:
        held["linear_q_proj.weight"] = part(attention["q_proj.weight"], size, rank)
    else:
        held["linear_q_up_proj.weight"] = part(attention["q_b_proj.weight"], size, rank)
        downs["linear_q_down_proj.weight"] = attention["q_a_proj.weight"]
        norms["q"] = attention["q_a_layernorm.weight"]
    for name, tensor in downs.items():
        held[name] = tensor.clone() if te else part(tensor, size, rank)
    for name, tensor in norms.items():
        held[f"linear_{name}_up_proj.layer_norm_weight" if te else f"{name}_layernorm.weight"] = (
            tensor.clone()
        )
    return {f"self_attention.{name}": tensor for name, tensor in held.items()}


def megatron_experts(layer: Tensors, g: ModelGeometry, size: int, rank: int, cut: ExpertCut) -> Tensors:
    m = g.moe
    assert m is not None
    held = {"mlp.router.weight": layer["mlp.gate.weight"].clone()}
    if m.has_bias:
        held["mlp.router.expert_bias"] = layer["mlp.gate.e_score_correction_bias"].clone()
    mine = torch.arange(m.num_experts).chunk(cut.ep_size)[cut.ep_rank].tolist()
    for local, expert in enumerate(mine):
        at = f"mlp.experts.{expert}."
        tensors = {
            "fc1": gate_up(layer, at, cut.etp_size, cut.etp_rank),
            "fc2": part(layer[f"{at}down_proj.weight"], cut.etp_size, cut.etp_rank, 1),
        }
        for name, tensor in tensors.items():
            grouped = f"mlp.experts.linear_{name}.weight{local}"
            held[grouped if cut.grouped else f"mlp.experts.local_experts.{local}.linear_{name}.weight"] = (
                tensor
            )
    if m.shared_ffn:
        held["mlp.shared_experts.linear_fc1.weight"] = gate_up(layer, "mlp.shared_experts.", size, rank)
        down = layer["mlp.shared_experts.down_proj.weight"]
        held["mlp.shared_experts.linear_fc2.weight"] = part(down, size, rank, 1)
    return held


def engine_mla(layer: Tensors, size: int, rank: int) -> Tensors:
    held = {
        "kv_b_proj.weight": part(layer["self_attn.kv_b_proj.weight"], size, rank),
        "o_proj.weight": part(layer["self_attn.o_proj.weight"], size, rank, 1),
        "kv_a_layernorm.weight": layer["self_attn.kv_a_layernorm.weight"].clone(),
    }
    latent = layer["self_attn.kv_a_proj_with_mqa.weight"]
    if "self_attn.q_proj.weight" in layer:
        held["q_proj.weight"] = part(layer["self_attn.q_proj.weight"], size, rank)
        held["kv_a_proj_with_mqa.weight"] = latent.clone()
    else:
        held["q_b_proj.weight"] = part(layer["self_attn.q_b_proj.weight"], size, rank)
        held["q_a_layernorm.weight"] = layer["self_attn.q_a_layernorm.weight"].clone()
        held["fused_qkv_a_proj_with_mqa.weight"] = torch.cat([layer["self_attn.q_a_proj.weight"], latent])
    return {f"self_attn.{name}": tensor for name, tensor in held.items()}


def engine_experts(layer: Tensors, g: ModelGeometry, size: int, rank: int, ep_size: int) -> Tensors:
    """One SGLang rank's experts: w13 [E / ep, 2 I / m, H], w2 [E / ep, H, I / m], m = size / ep."""
    m = g.moe
    assert m is not None
    moe_tp = size // ep_size
    ep_rank, moe_rank = divmod(rank, moe_tp)
    mine = torch.arange(m.num_experts).chunk(ep_size)[ep_rank].tolist()
    downs = [part(layer[f"mlp.experts.{expert}.down_proj.weight"], moe_tp, moe_rank, 1) for expert in mine]
    held = {
        "mlp.gate.weight": layer["mlp.gate.weight"].clone(),
        "mlp.experts.w13_weight": torch.stack(
            [gate_up(layer, f"mlp.experts.{expert}.", moe_tp, moe_rank) for expert in mine]
        ),
        "mlp.experts.w2_weight": torch.stack(downs),
    }
    if m.has_bias:
        name = "mlp.gate.e_score_correction_bias"
        held[name] = layer[name].clone()
    if m.shared_ffn:
        held["mlp.shared_experts.gate_up_proj.weight"] = gate_up(layer, "mlp.shared_experts.", size, rank)
        down = "mlp.shared_experts.down_proj.weight"
        held[down] = part(layer[down], size, rank, 1)
    return held
