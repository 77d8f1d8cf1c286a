"""The policy as megatron model chunks, one per virtual pipeline stage of this rank.

    ModelGeometry + ParallelLayout -> TransformerConfig -> PolicyModel chunks

A `PolicyModel` is megatron's `GPTModel` whose last stage returns the logprobs of the tokens that the
micro-batch asks for, instead of logits. Positions are rotated inside `PackedAttention`, so the model
is built without megatron's position embedding. Parameters are allocated, not initialised: the
checkpoint fills them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from asyncrl.weights.geometry import ModelError, ModelGeometry
from megatron_ext.attention import PackedAttention, PackedParams
from megatron_ext.logprobs import token_logprobs
from megatron_ext.norm import RMSNorm
from megatron_ext.parallel import ParallelLayout

VOCAB_MULTIPLE = 128


class PolicyModel(GPTModel):
    """A `GPTModel` chunk that ends in logprobs."""

    def __init__(self, real_vocab_size: int, **options: Any) -> None:
        super().__init__(**options)
        self.real_vocab_size = real_vocab_size

    def _postprocess(
        self, hidden_states: torch.Tensor, *, packed_seq_params: PackedParams, **_options: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """hidden [t, 1, h] -> itself, or on the last stage (logprobs, entropy) of the scored entries."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states)
        head = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            head = self.shared_embedding_or_output_weight()
        return token_logprobs(
            hidden.squeeze(1).index_select(0, packed_seq_params.scored),
            head,
            packed_seq_params.labels,
            temperature=packed_seq_params.temperature,
            vocab_size=self.real_vocab_size,
            tp_group=mpu.get_tensor_model_parallel_group(),
        )


def padded_vocab(vocab_size: int, tp: int) -> int:
    """The vocabulary rounded up so that TP divides it; the same for TP = 1, 2, 4 ... 128."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp)
    return -(-vocab_size // multiple) * multiple


def transformer_config(
    geometry: ModelGeometry, layout: ParallelLayout, dtype: torch.dtype
) -> TransformerConfig:
    """megatron's configuration of this model under this layout.

    Raises:
        ModelError: the layers cannot be cut evenly, or the heads do not divide by TP, or the trainer cannot
            build such layers yet.
    """
    if geometry.untrainable:
        raise ModelError(
            f"{geometry.family} has {geometry.untrainable}, which the trainer cannot build yet;"
            " name a dense model (llama, qwen2, qwen3)"
        )
    num_chunks = layout.pp * layout.vpp
    if geometry.num_layers % num_chunks:
        raise ModelError(
            f"{geometry.num_layers} layers cannot be cut into {num_chunks} equal stages"
            f" (pp {layout.pp} x vpp {layout.vpp}); choose a divisor"
        )
    if geometry.num_heads % layout.tp:
        raise ModelError(f"{geometry.num_heads} attention heads cannot be cut by tp {layout.tp}")
    return TransformerConfig(
        num_layers=geometry.num_layers,
        hidden_size=geometry.hidden_size,
        num_attention_heads=geometry.num_heads,
        num_query_groups=geometry.num_kv_heads,
        kv_channels=geometry.head_dim,
        ffn_hidden_size=geometry.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=geometry.norm_eps,
        qk_layernorm=geometry.qk_norm,
        add_qkv_bias=geometry.attention_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # megatron marks its tensor-parallel parameters (for the gradient norm) where it initialises them,
        # so initialisation stays on and does nothing.
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        # Sums, not means: the loss weights already divide by the global batch.
        calculate_per_token_loss=True,
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall",  # unused; the default refuses variable lengths
        # Under the interleaved schedule batched sends between two ranks pair the wrong tensors.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """Initialise nothing: the checkpoint fills every parameter."""
    return weight


def build_chunks(
    geometry: ModelGeometry, layout: ParallelLayout, config: TransformerConfig
) -> list[PolicyModel]:
    """This rank's model chunks, in order of virtual stage; parameters are uninitialised memory."""
    stages = list(range(layout.vpp)) if layout.vpp > 1 else [None]
    return [_build_chunk(geometry, layout, config, stage) for stage in stages]


def _build_chunk(
    geometry: ModelGeometry, layout: ParallelLayout, config: TransformerConfig, vp_stage: int | None
) -> PolicyModel:
    where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return PolicyModel(
        real_vocab_size=geometry.vocab_size,
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[_layer_spec(geometry)] * num_layers, layer_norm=RMSNorm
        ),
        vocab_size=padded_vocab(geometry.vocab_size, layout.tp),
        max_sequence_length=geometry.max_position,
        pre_process=mpu.is_pipeline_first_stage(**where),
        post_process=mpu.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=geometry.tied_embeddings,
        position_embedding_type="none",
        vp_stage=vp_stage,
    )


def _layer_spec(geometry: ModelGeometry) -> ModuleSpec:
    """A decoder layer of the Llama family; parameter names are those of megatron's local layer spec."""
    head_norm = RMSNorm if geometry.qk_norm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
