"""Builds real SGLang models of the expert families, rank after rank, and prints their parameters as JSON.

usage: sglang_modules_worker.py CASES_JSON    (a list of [family, tp, ep])

Each rank is built in this one process on the meta device, under SGLang's own context with that rank's
numbers; nobody communicates. Printed per case: name, shape and dtype of every parameter of every rank.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

from asyncrl.engines import launcher  # isort: skip  (its preparations come before SGLang)
import torch
from sglang.srt.runtime_context import get_context, get_parallel
from transformers import DeepseekV3Config, PretrainedConfig, Qwen3MoeConfig

from asyncrl.weights.geometry import ModelGeometry
from tests.shard_reference import geometry

GROUP = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1, rank_in_group=0)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def config_of(g: ModelGeometry) -> PretrainedConfig:
    assert g.moe is not None
    common = {
        "num_hidden_layers": g.num_layers,
        "hidden_size": g.hidden_size,
        "num_attention_heads": g.num_heads,
        "intermediate_size": g.ffn_hidden_size,
        "moe_intermediate_size": g.moe.expert_ffn,
        "vocab_size": g.vocab_size,
        "num_experts_per_tok": 2,
    }
    if g.mla is None:
        experts = {"num_experts": g.moe.num_experts, "num_key_value_heads": g.num_kv_heads}
        return Qwen3MoeConfig(head_dim=g.head_dim, **experts, **common)
    return DeepseekV3Config(
        num_key_value_heads=g.num_heads,
        n_routed_experts=g.moe.num_experts,
        n_shared_experts=g.moe.shared_ffn // g.moe.expert_ffn or None,
        first_k_dense_replace=len(g.moe.dense_layers),
        n_group=1,
        topk_group=1,
        q_lora_rank=g.mla.q_rank or None,
        kv_lora_rank=g.mla.kv_rank,
        qk_nope_head_dim=g.mla.nope_dim,
        qk_rope_head_dim=g.mla.rope_dim,
        v_head_dim=g.mla.v_dim,
        architectures=["DeepseekV3ForCausalLM"],
        topk_method="noaux_tc",
        rope_parameters=YARN,
        moe_layer_freq=1,
        scoring_func="sigmoid",
        **common,
    )


def build(family: str, tp: int, ep: int) -> list[dict[str, object]]:
    from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
    from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

    g = geometry(family)
    model_class = Qwen3MoeForCausalLM if g.mla is None else DeepseekV3ForCausalLM
    ranks = []
    for rank in range(tp):
        place = {"tp_rank": rank, "attn_tp_rank": rank, "pp_rank": 0, "pp_size": 1, "pp_group": GROUP}
        moe_tp = tp // ep
        place |= {"moe_ep_rank": rank // moe_tp, "moe_tp_rank": rank % moe_tp}
        for name, size in (("tp", tp), ("attn_tp", tp), ("moe_ep", ep), ("moe_tp", moe_tp)):
            place[f"{name}_group"] = SimpleNamespace(
                world_size=size, rank_in_group=place[f"{name}_rank"], cpu_group=None, device_group=None
            )
        sizes = {"tp_size": tp, "attn_tp_size": tp, "moe_ep_size": ep, "moe_tp_size": moe_tp}
        with get_parallel().override(**place, **sizes), torch.device("meta"):
            model = model_class(config_of(g))
        ranks.append(
            {
                name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
                for name, tensor in model.named_parameters()
            }
        )
    return ranks


def main() -> None:
    assert launcher
    torch.set_default_dtype(torch.bfloat16)
    with get_context().override_server_args(device="cpu", disable_shared_experts_fusion=True):
        for family, tp, ep in json.loads(sys.argv[1]):
            print(json.dumps({"case": [family, tp, ep], "ranks": build(family, tp, ep)}))


if __name__ == "__main__":
    main()
