"""Builds real Megatron models of the expert families, rank after rank, and prints their parameters as JSON.

usage: megatron_modules_worker.py CASES_JSON    (a list of [family, tp, pp, ep, etp])

Every rank of a layout is built in this one process, on a process group that connects to nobody, so that any
layout costs only the modules of one rank at a time. Printed per case and rank: the layer numbers, and name,
shape and dtype of every parameter and of the router's bias.
"""

from __future__ import annotations

import json
import sys

import megatron_ext  # isort: skip  (before megatron)
import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from asyncrl.weights.geometry import ModelGeometry
from tests.shard_reference import geometry

assert megatron_ext  # adapts megatron to a machine without CUDA
PADDED_VOCAB = 128


class NoAttention(torch.nn.Module):
    """In the place of the kernel, which has no parameters and which MLA needs Transformer Engine for."""

    def __init__(self, **options: object) -> None:
        super().__init__()


multi_latent_attention.TELinear = NoAttention  # megatron asks isinstance() of it even without the package


def config_of(g: ModelGeometry, tp: int, pp: int, ep: int, etp: int) -> TransformerConfig:
    assert g.moe is not None
    common = {
        "num_layers": g.num_layers,
        "hidden_size": g.hidden_size,
        "num_attention_heads": g.num_heads,
        "ffn_hidden_size": g.ffn_hidden_size,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "pipeline_dtype": torch.bfloat16,
        "params_dtype": torch.bfloat16,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "num_moe_experts": g.moe.num_experts,
        "moe_ffn_hidden_size": g.moe.expert_ffn,
        "moe_router_topk": 2,
        "moe_layer_freq": [int(g.is_moe_layer(idx)) for idx in range(g.num_layers)],
        "moe_shared_expert_intermediate_size": g.moe.shared_ffn or None,
        "moe_router_enable_expert_bias": g.moe.has_bias,
        "moe_router_score_function": "sigmoid" if g.moe.has_bias else "softmax",
        "gradient_accumulation_fusion": False,
        "qk_layernorm": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    if g.mla is None:
        return TransformerConfig(num_query_groups=g.num_kv_heads, kv_channels=g.head_dim, **common)
    return MLATransformerConfig(
        multi_latent_attention=True,
        q_lora_rank=g.mla.q_rank or None,
        kv_lora_rank=g.mla.kv_rank,
        qk_head_dim=g.mla.nope_dim,
        qk_pos_emb_head_dim=g.mla.rope_dim,
        v_head_dim=g.mla.v_dim,
        **common,
    )


def build(family: str, rank: int, tp: int, pp: int, ep: int, etp: int) -> dict[str, object]:
    world_size = pp * max(tp, ep * etp)
    torch.distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    mpu.initialize_model_parallel(
        tp,
        pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )
    g = geometry(family)
    config = config_of(g, tp, pp, ep, etp)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = NoAttention
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=PADDED_VOCAB,
        max_sequence_length=64,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=g.tied_embeddings,
        position_embedding_type="rope",
    )
    held = dict(model.named_parameters())
    held |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")}
    result = {
        "rank": rank,
        "layer_numbers": [layer.layer_number for layer in model.decoder.layers],
        "first": model.pre_process,
        "last": model.post_process,
        "shapes": {name: list(tensor.shape) for name, tensor in held.items()},
        "float32": [name for name, tensor in held.items() if tensor.dtype is torch.float32],
        "coord": [
            mpu.get_tensor_model_parallel_rank(),
            mpu.get_expert_model_parallel_rank(),
            mpu.get_expert_tensor_parallel_rank(),
        ],
    }
    mpu.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return result


def main() -> None:
    for family, tp, pp, ep, etp in json.loads(sys.argv[1]):
        ranks = [build(family, rank, tp, pp, ep, etp) for rank in range(pp * max(tp, ep * etp))]
        print(json.dumps({"case": [family, tp, pp, ep, etp], "ranks": ranks}))


if __name__ == "__main__":
    main()
