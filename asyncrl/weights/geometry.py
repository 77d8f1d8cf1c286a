"""What a model looks like, read from the config.json of its Hugging Face directory.

    config.json -> ModelGeometry -> layouts of the trainer (megatron_layout) and of the engine (engine_layout)

A family is one row of ``FAMILIES``: the architecture that config.json names, and what its layers carry beyond
the common ones. A variant that the layouts would get wrong is refused here, by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """The model directory, its architecture, or a parallel layout of it cannot be used; one line."""


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes an architecture: RMSNorm on each query and key head; bias on q, k and v."""

    name: str
    qk_norm: bool = False
    qkv_bias: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family("llama"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's stretching of RoPE frequencies to longer contexts, as config.json gives it."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The sizes and switches of a dense decoder; enough to build it and to lay its parameters out."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    qk_norm: bool
    attention_bias: bool  # on q, k and v; the output projection has none
    rope_theta: float
    rope_scaling: Llama3Rope | None
    norm_eps: float
    max_position: int

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads are not a multiple of {self.num_kv_heads} key/value heads"
            )

    @staticmethod
    def from_hf(directory: Path) -> ModelGeometry:
        """Read ``directory/config.json``.

        Raises:
            ModelError: no readable config.json, an unknown architecture, or a variant that is not supported.
        """
        config = _read_config(directory)
        architecture = (config.get("architectures") or ["none"])[0]
        family = FAMILIES.get(architecture)
        if family is None:
            known = ", ".join(FAMILIES)
            raise ModelError(f"{directory}: architecture {architecture} is not supported; known: {known}")
        _refuse_variants(directory, config, family)
        num_heads = _required(directory, config, "num_attention_heads")
        hidden_size = _required(directory, config, "hidden_size")
        rope = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        return ModelGeometry(
            family=family.name,
            num_layers=_required(directory, config, "num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            ffn_hidden_size=_required(directory, config, "intermediate_size"),
            vocab_size=_required(directory, config, "vocab_size"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=family.qk_norm,
            attention_bias=family.qkv_bias,
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            rope_scaling=_rope_scaling(directory, rope),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position=_required(directory, config, "max_position_embeddings"),
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


def _required(directory: Path, config: dict[str, Any], key: str) -> int:
    if key not in config:
        raise ModelError(f"{directory}/config.json: {key} is missing")
    return int(config[key])


def _refuse_variants(directory: Path, config: dict[str, Any], family: Family) -> None:
    if config.get("attention_bias") and not family.qkv_bias:
        raise ModelError(f"{directory}: {family.name} with attention_bias is not supported")
    if config.get("mlp_bias"):
        raise ModelError(f"{directory}: {family.name} with mlp_bias is not supported")
    if config.get("use_sliding_window"):
        raise ModelError(f"{directory}: {family.name} with use_sliding_window is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{directory}: hidden_act {config['hidden_act']} is not supported; known: silu")
    if config.get("quantization_config"):
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
