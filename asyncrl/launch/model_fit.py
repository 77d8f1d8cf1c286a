"""Whether a model can be cut and run as configured: pure rules over its geometry.

Config, ModelGeometry -> one line per rule that is broken: the value, the rule, the nearest valid choice
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from asyncrl.config import Config
from asyncrl.trainer.plan import pad_multiple, padded_length
from asyncrl.weights.geometry import ModelGeometry


def model_fit_problems(config: Config, geometry: ModelGeometry, *, on_cpu: bool) -> list[str]:
    """Every rule that trainer, engine or sample lengths break; empty when the model fits."""
    if geometry.untrainable:
        return [
            f"model.path: {geometry.family} has {geometry.untrainable}, which the trainer cannot build yet;"
            " name a dense model (llama, qwen2, qwen3)"
        ]
    return [
        *_trainer_problems(config, geometry),
        *_pipeline_problems(config, geometry),
        *_engine_problems(config, geometry, on_cpu),
        *_length_problems(config, geometry),
    ]


def longest_sample(config: Config) -> int:
    """Tokens of the longest possible sample, padded as a micro-batch holds it."""
    parallel = config.parallel
    multiple = pad_multiple(cp=parallel.cp, tp=parallel.tp, sequence_parallel=parallel.sequence_parallel)
    return padded_length(config.rollout.max_prompt_tokens + config.rollout.max_new_tokens, multiple)


def _trainer_problems(config: Config, geometry: ModelGeometry) -> list[str]:
    tp = config.parallel.tp
    kv_heads = geometry.num_kv_heads

    def splits(size: int) -> bool:
        divides_kv = kv_heads % size == 0 or size % kv_heads == 0
        return geometry.num_heads % size == 0 and divides_kv and geometry.ffn_hidden_size % size == 0

    return _tp_problems("parallel.tp", tp, geometry, splits, kv_rule="be a multiple or a divisor of tp")


def _engine_problems(config: Config, geometry: ModelGeometry, on_cpu: bool) -> list[str]:
    tp = config.engine.tp
    kv_heads = geometry.num_kv_heads

    def splits(size: int) -> bool:
        replicates_kv = not on_cpu and size % kv_heads == 0
        divides_kv = kv_heads % size == 0 or replicates_kv
        return geometry.num_heads % size == 0 and divides_kv and geometry.ffn_hidden_size % size == 0

    rule = "be a multiple of tp on a CPU" if on_cpu else "be a multiple or a divisor of tp"
    problems = _tp_problems("engine.tp", tp, geometry, splits, kv_rule=rule)
    if config.engine.context_length > geometry.max_position:
        problems.append(
            f"engine.context_length = {config.engine.context_length} exceeds the model's"
            f" max_position_embeddings = {geometry.max_position}; set it to {geometry.max_position} or less"
        )
    return problems


def _tp_problems(
    setting: str, tp: int, geometry: ModelGeometry, splits: Callable[[int], bool], *, kv_rule: str
) -> list[str]:
    if splits(tp):
        return []
    valid = [size for size in range(1, geometry.num_heads + 1) if splits(size)]
    return [
        f"{setting} = {tp} cannot cut {geometry.num_heads} attention heads, {geometry.num_kv_heads} key/value"
        f" heads and ffn_hidden_size {geometry.ffn_hidden_size}: tp must divide heads and"
        f" ffn_hidden_size, and key/value heads must {kv_rule}; nearest: {setting} = {nearest(tp, valid)}"
    ]


def _pipeline_problems(config: Config, geometry: ModelGeometry) -> list[str]:
    pp, vpp, layers = config.parallel.pp, config.parallel.vpp, geometry.num_layers
    if layers % (pp * vpp) == 0:
        return []
    choices = [(size, vpp) for size in range(2 if vpp > 1 else 1, layers + 1) if layers % (size * vpp) == 0]
    fallback = [size for size in range(1, layers + 1) if layers % size == 0]
    if choices:
        advice = f"parallel.pp = {nearest(pp, [size for size, _ in choices])}"
    else:
        advice = f"parallel.vpp = 1 and pp = {nearest(pp, fallback)}"
    return [
        f"parallel.pp = {pp} x vpp = {vpp} does not divide the model's {layers} layers into equal chunks;"
        f" nearest: {advice}"
    ]


def _length_problems(config: Config, geometry: ModelGeometry) -> list[str]:
    problems = []
    longest = longest_sample(config)
    if longest > config.train.microbatch_tokens:
        problems.append(
            f"train.microbatch_tokens = {config.train.microbatch_tokens} cannot hold the longest sample:"
            f" rollout.max_prompt_tokens = {config.rollout.max_prompt_tokens} + max_new_tokens ="
            f" {config.rollout.max_new_tokens}, {longest} padded; set it to {longest} or more"
        )
    unpadded = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if unpadded > geometry.max_position:
        problems.append(
            f"rollout.max_prompt_tokens + max_new_tokens = {unpadded} exceeds the model's"
            f" max_position_embeddings = {geometry.max_position}; lower one of them"
        )
    return problems


def nearest(value: int, choices: Iterable[int]) -> int:
    """The choice closest to ``value``, the smaller one of two."""
    return min(choices, key=lambda choice: (abs(choice - value), choice))
