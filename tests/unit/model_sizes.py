"""Models of every family, small but cut as finely as the largest clusters cut them, and such layouts."""

from __future__ import annotations

import itertools

from asyncrl.weights.geometry import MlaGeometry, ModelGeometry, MoeGeometry
from asyncrl.weights.splits import EngineSplit, TrainerSplit

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")


def reduced(family: str, num_layers: int = 16) -> ModelGeometry:
    """Heads, experts and widths that TP 32, EP 64 and PP 16 divide; about 10^7 parameters."""
    moe = mla = None
    if family == "qwen3_moe":
        moe = MoeGeometry(64, 64, 0, has_bias=False, dense_layers=frozenset())
    if family == "deepseek_v3":
        moe = MoeGeometry(64, 64, 64, has_bias=True, dense_layers=frozenset({0}))
        mla = MlaGeometry(64, 32, 16, 8, 16)
    return ModelGeometry(
        family=family,
        num_layers=num_layers,
        hidden_size=128,
        num_heads=32,
        num_kv_heads=8,
        head_dim=8,
        ffn_hidden_size=512,
        vocab_size=1000,
        tied_embeddings=family == "llama",
        qk_norm=family.startswith("qwen3"),
        attention_bias=family == "qwen2",
        rope_theta=1e4,
        rope_scaling=None,
        norm_eps=1e-6,
        max_position=128,
        moe=moe,
        mla=mla,
    )


DENSE_TRAINERS = (
    TrainerSplit(),
    TrainerSplit(tp=2, dp=3),
    TrainerSplit(tp=4, pp=2, vpp=2),
    TrainerSplit(tp=8, pp=4, cp=2),
    TrainerSplit(tp=16, pp=2),
    TrainerSplit(tp=1, pp=16, dp=2),
    TrainerSplit(tp=2, pp=3, layers=(4, 7, 5)),
    TrainerSplit(tp=16, pp=16),
    TrainerSplit(tp=4, pp=1, cp=2, dp=2),
    TrainerSplit(tp=8, pp=8, vpp=2),
)
EXPERT_TRAINERS = (
    TrainerSplit(ep=2),
    TrainerSplit(tp=2, ep=4, etp=2),
    TrainerSplit(tp=4, pp=2, ep=8, vpp=2),
    TrainerSplit(tp=8, pp=4, cp=2, ep=16),
    TrainerSplit(tp=16, pp=2, ep=2, etp=8),
    TrainerSplit(tp=1, pp=16, ep=16),
    TrainerSplit(tp=2, pp=3, ep=4, dp=4, layers=(4, 7, 5)),
    TrainerSplit(tp=16, pp=16, ep=8, etp=2),
    TrainerSplit(tp=2, pp=2, ep=64),
    TrainerSplit(tp=4, pp=5, ep=32, cp=2),
)
DENSE_ENGINES = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1))
EXPERT_ENGINES = ((2, 2), (4, 1), (8, 4), (16, 16), (32, 8), (32, 32))


def pairs(family: str) -> list[tuple[TrainerSplit, EngineSplit]]:
    """Sixty layout pairs."""
    experts = family in ("qwen3_moe", "deepseek_v3")
    trainers = EXPERT_TRAINERS if experts else DENSE_TRAINERS
    engines = EXPERT_ENGINES if experts else DENSE_ENGINES
    return [(trainer, EngineSplit(*engine)) for trainer, engine in itertools.product(trainers, engines)]
