"""What a run will need, before anything is started: batch arithmetic and memory per rank.

    Config, ModelGeometry -> batch_equation, memory_estimate, engine_memory

Parameters are counted exactly, from the same layouts by which they are loaded; activations are an
estimate. No function needs the machine, so any world size can be asked about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.launch.model_fit import longest_sample
from asyncrl.weights.engine_layout import engine_shards
from asyncrl.weights.geometry import ModelGeometry
from asyncrl.weights.layout import ShardLayout
from asyncrl.weights.megatron_layout import MegatronCoord, megatron_shards

GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2}
RUNTIME_BYTES = 380 << 20
"""Resident memory of a rank that has imported torch and megatron-core and holds no model."""
ALLOCATOR_OVERHEAD = 1.3
"""Peak resident memory over what is alive, measured on a CPU (SmolLM2-135M, micro-batch of 2,048 tokens)."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on the trainer ranks of one pipeline stage; all ranks of a stage are alike."""

    pp_rank: int
    num_parameters: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    copies: int  # of the parameters, for publications

    @property
    def total(self) -> int:
        state = self.parameters + self.gradients + self.optimizer + self.copies
        return state + self.activations + RUNTIME_BYTES


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on every rank of an engine."""

    parameters: int
    kv_cache: int
    copies: int  # of the parameters, for publications

    @property
    def total(self) -> int:
        return self.parameters + self.kv_cache + self.copies + RUNTIME_BYTES


def batch_equation(config: Config) -> str:
    """One step as an equation: prompts x samples = sequences = replicas x share = micro-batches."""
    train, dp = config.train, config.parallel.dp
    share = train.samples_per_step // dp
    longest = longest_sample(config)
    per_microbatch = max(1, train.microbatch_tokens // longest)
    most = math.ceil(share / per_microbatch)
    return (
        f"{train.prompts_per_step} prompts x {train.samples_per_prompt} samples"
        f" = {train.samples_per_step} sequences = {_count(dp, 'replica')} x {share} sequences;"
        f" {share} sequences of at most {longest} tokens"
        f" = at most {_count(most, 'micro-batch')} of {train.microbatch_tokens} tokens per replica and step"
    )


def memory_estimate(config: Config, geometry: ModelGeometry) -> tuple[RankMemory, ...]:
    """The memory of a trainer rank of each pipeline stage, first stage first.

    Raises:
        ModelError: the model cannot be cut as configured.
    """
    return tuple(_rank_memory(config, geometry, pp_rank) for pp_rank in range(config.parallel.pp))


def engine_memory(config: Config, geometry: ModelGeometry) -> EngineMemory:
    """The memory of one engine rank: parameters, and the KV cache for ``engine.max_total_tokens``."""
    size = BYTES[config.engine_dtype]
    tp = config.engine.tp
    local_kv_heads = max(1, geometry.num_kv_heads // tp)
    tokens = config.engine.max_total_tokens or 8192
    parameters = _num_elements(engine_shards(geometry, tp, 0)) * size
    return EngineMemory(
        parameters=parameters,
        kv_cache=tokens * geometry.num_layers * 2 * local_kv_heads * geometry.head_dim * size,
        copies=0 if config.weights.stage == "none" else parameters,
    )


def stage_layers(num_layers: int, pp: int, vpp: int, pp_rank: int) -> tuple[tuple[int, ...], ...]:
    """The 1-based layer numbers of each model chunk on a pipeline rank, chunk by chunk.

    Chunk v of rank p holds a run of layers / (pp * vpp) layers that starts after v * pp + p such runs.
    """
    size = num_layers // (pp * vpp)
    starts = [(chunk * pp + pp_rank) * size + 1 for chunk in range(vpp)]
    return tuple(tuple(range(start, start + size)) for start in starts)


def _rank_memory(config: Config, geometry: ModelGeometry, pp_rank: int) -> RankMemory:
    parallel = config.parallel
    chunks = stage_layers(geometry.num_layers, parallel.pp, parallel.vpp, pp_rank)
    num_parameters = 0
    for chunk_idx, layers in enumerate(chunks):
        coord = MegatronCoord(
            tp_size=parallel.tp,
            tp_rank=0,
            layer_numbers=layers,
            has_embedding=pp_rank == 0 and chunk_idx == 0,
            has_output=pp_rank == parallel.pp - 1 and chunk_idx == parallel.vpp - 1,
            padded_vocab=math.ceil(geometry.vocab_size / parallel.tp) * parallel.tp,
        )
        num_parameters += _num_elements(megatron_shards(geometry, coord))
    size = BYTES[config.model.dtype]
    # Adam's two float32 moments, and a float32 copy of the parameters where they are not float32.
    optimizer = num_parameters * (8 if size == 4 else 12)
    if parallel.distributed_optimizer:
        optimizer = math.ceil(optimizer / (parallel.dp * parallel.cp))
    return RankMemory(
        pp_rank=pp_rank,
        num_parameters=num_parameters,
        parameters=num_parameters * size,
        gradients=num_parameters * 4,  # accumulated in float32
        optimizer=optimizer,
        activations=_activations(config, geometry, sum(map(len, chunks)), pp_rank),
        copies=num_parameters * size * (config.weights.delta + config.weights.overlap),
    )


def _activations(config: Config, geometry: ModelGeometry, num_layers: int, pp_rank: int) -> int:
    """Bytes at the peak of the backward pass; 1F1B keeps the micro-batches of pp - rank steps.

    Counted with autograd's saved-tensor hooks, a layer keeps per token 7 tensors of the hidden size
    (cut by sequence parallelism), q, k, v, rotated q, the attention's result and shared k (heads cut by
    TP), and 5 of the MLP's size (gate and up, silu, product, and a copy; cut by TP). The last stage adds
    the float32 gradients of head and embedding; logits exist one chunk at a time.
    """
    parallel = config.parallel
    tokens = math.ceil(config.train.microbatch_tokens / parallel.cp)
    hidden = 7 * geometry.hidden_size / (parallel.tp if parallel.sequence_parallel else 1)
    heads = 3 * (geometry.num_heads + geometry.num_kv_heads) * geometry.head_dim / parallel.tp
    mlp = 5 * geometry.ffn_hidden_size / parallel.tp
    kept = tokens * num_layers * (hidden + heads + mlp) * BYTES[config.model.dtype]
    head = 0.0
    if pp_rank == parallel.pp - 1:
        head = 2 * 4 * geometry.vocab_size * geometry.hidden_size / parallel.tp
    return math.ceil(kept * (parallel.pp - pp_rank) * ALLOCATOR_OVERHEAD + head)


def _num_elements(shards: Iterable[ShardLayout]) -> int:
    return sum(math.prod(shard.shape) for shard in shards)


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}es" if noun.endswith("ch") else f"{number} {noun}s"
