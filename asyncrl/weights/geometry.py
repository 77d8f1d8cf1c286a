"""What a model looks like, read from the config.json of its Hugging Face directory.

    config.json -> ModelGeometry -> layouts of the trainer (megatron_layout) and of the engine (engine_layout)

An architecture is one file of `asyncrl.weights.families`. A variant that the layouts would get wrong is
refused here, by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """The model directory, its architecture, or a parallel layout of it cannot be used; one line."""


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's stretching of RoPE frequencies to longer contexts, as config.json gives it."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class MoeGeometry:
    """Mixture-of-experts layers; ``dense_layers`` counts from 0 and names those that have none."""

    num_experts: int
    expert_ffn: int
    shared_ffn: int  # of all shared experts together; 0 where there is none
    has_bias: bool  # a float32 correction per expert beside the router
    dense_layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class MlaGeometry:
    """Multi-head latent attention; ``q_rank`` 0 means that the query has no low-rank projection."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The sizes and switches of a decoder; enough to lay its parameters out."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int  # of dense layers
    vocab_size: int
    tied_embeddings: bool
    qk_norm: bool
    attention_bias: bool  # on q, k and v; the output projection has none
    rope_theta: float
    rope_scaling: Llama3Rope | None
    norm_eps: float
    max_position: int
    moe: MoeGeometry | None = None
    mla: MlaGeometry | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads are not a multiple of {self.num_kv_heads} key/value heads"
            )

    @property
    def untrainable(self) -> str:
        """Why the trainer cannot build this model, in a few words; empty where it can."""
        parts = []
        if self.moe is not None:
            parts.append("mixture-of-experts layers")
        if self.mla is not None:
            parts.append("multi-head latent attention")
        return " and ".join(parts)

    def is_moe_layer(self, layer_idx: int) -> bool:
        """Whether layer ``layer_idx``, counted from 0, has experts."""
        return self.moe is not None and layer_idx not in self.moe.dense_layers

    @staticmethod
    def from_hf(directory: Path, *, allow_fp8: bool = False) -> ModelGeometry:
        """Read ``directory/config.json``; ``allow_fp8`` takes a checkpoint of fp8 blocks for its sizes alone.

        Raises:
            ModelError: no readable config.json, an unknown architecture, or a variant that is not supported.
        """
        from asyncrl.weights.families import FAMILIES  # they describe layers by this very class

        config = _read_config(directory)
        architecture = (config.get("architectures") or ["none"])[0]
        family = FAMILIES.get(architecture)
        if family is None:
            known = ", ".join(FAMILIES)
            raise ModelError(f"{directory}: architecture {architecture} is not supported; known: {known}")
        _refuse_variants(directory, config, family.name, qkv_bias=family.qkv_bias)
        _refuse_quantised(directory, config, allow_fp8=allow_fp8)
        num_heads = required(directory, config, "num_attention_heads")
        hidden_size = required(directory, config, "hidden_size")
        rope = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        return ModelGeometry(
            family=family.name,
            num_layers=required(directory, config, "num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            ffn_hidden_size=required(directory, config, "intermediate_size"),
            vocab_size=required(directory, config, "vocab_size"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=family.qk_norm,
            attention_bias=family.qkv_bias,
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            rope_scaling=None if family.rope_is_its_own else _rope_scaling(directory, rope),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position=required(directory, config, "max_position_embeddings"),
            moe=family.read_moe(directory, config) if family.read_moe else None,
            mla=family.read_mla(directory, config) if family.read_mla else None,
        )


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{directory}: no config.json; name a Hugging Face model directory") from None
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from None
    return config


def required(directory: Path, config: dict[str, Any], key: str) -> int:
    """An integer of config.json, or a `ModelError` that names the key."""
    if config.get(key) is None:
        raise ModelError(f"{directory}/config.json: {key} is missing")
    return int(config[key])


def _refuse_variants(directory: Path, config: dict[str, Any], name: str, *, qkv_bias: bool) -> None:
    if config.get("attention_bias") and not qkv_bias:
        raise ModelError(f"{directory}: {name} with attention_bias is not supported")
    if config.get("mlp_bias"):
        raise ModelError(f"{directory}: {name} with mlp_bias is not supported")
    if config.get("use_sliding_window"):
        raise ModelError(f"{directory}: {name} with use_sliding_window is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{directory}: hidden_act {config['hidden_act']} is not supported; known: silu")


def _refuse_quantised(directory: Path, config: dict[str, Any], *, allow_fp8: bool) -> None:
    quantised = config.get("quantization_config")
    if quantised and not (allow_fp8 and quantised.get("quant_method") == "fp8"):
        raise ModelError(f"{directory}: quantised weights cannot be trained; name the unquantised model")


def _rope_scaling(directory: Path, rope: dict[str, Any]) -> Llama3Rope | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"{directory}: rope_type {kind} is not supported; known: default, llama3")
    return Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=int(rope["original_max_position_embeddings"]),
    )
