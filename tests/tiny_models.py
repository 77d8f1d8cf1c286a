"""Tiny random Hugging Face models with a byte-level tokenizer, for every test that needs a model.

    make_tiny("qwen3", directory, seed=0) -> config.json, model.safetensors, tokenizer, chat template

Weights are drawn with a deviation of 0.15 (norm weights around 1, biases around 0), so that two seeds
give clearly different outputs and a misplaced tensor shows. The same seed always gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from asyncrl.data.torchvision_ops import declare_torchvision_operators

declare_torchvision_operators()

from transformers import (  # noqa: E402
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Kind = Literal["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
DEEPSEEK_SIZES = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rope_interleave": True,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
DEFAULT_VOCAB = 272  # room for 256 bytes and the special tokens; no multiple of 64, so that padding shows


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are single bytes plus end, pad and begin."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: idx for idx, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|eos|>", pad_token="<|pad|>", bos_token="<|bos|>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_tiny(
    kind: Kind,
    directory: Path,
    seed: int = 0,
    *,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    ffn_hidden_size: int = 128,
    vocab: int = DEFAULT_VOCAB,
    tied: bool = False,
    ends: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random model of family ``kind`` and its tokenizer into ``directory``, and return it.

    A random model samples each token about once in ``vocab`` tokens, also the one that ends a sample; where
    not ``ends``, the model declares none, and a sample lasts as long as its request allows.

    Raises:
        ValueError: ``vocab`` cannot hold the byte tokenizer, or the family cannot have this head size.
    """
    tokenizer = byte_tokenizer()
    if vocab < len(tokenizer):
        raise ValueError(f"vocab = {vocab} cannot hold the {len(tokenizer)} tokens of the byte tokenizer")
    if kind == "qwen2" and num_heads * head_dim != hidden_size:
        raise ValueError(f"qwen2 needs num_heads * head_dim = hidden_size, got {num_heads} * {head_dim}")
    common = {
        "vocab_size": vocab,
        "hidden_size": hidden_size,
        "intermediate_size": ffn_hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "eos_token_id": tokenizer.eos_token_id if ends else None,
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(head_dim=head_dim, rms_norm_eps=1e-5, **common))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(rms_norm_eps=1e-6, **common))
    elif kind == "qwen3_moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(head_dim=head_dim, rms_norm_eps=1e-6, **experts, **common))
    elif kind == "deepseek_v3":
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**common | DEEPSEEK_SIZES))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=head_dim, rms_norm_eps=1e-6, **common))
    _randomise(model, seed)
    model.to(dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Redraw every parameter from one seeded generator, in order of name."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.15 * noise)
            else:  # a norm's weight (1 from the constructor) or a bias (0 from the constructor)
                parameter.copy_(parameter.float() + 0.1 * noise)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
