"""Checks over several sections of a configuration; a problem is one line that says what to write."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.config import Config


def batch_problems(config: Config) -> list[str]:
    """Sizes that do not fit together; one line each."""
    problems = []
    prompts, dp = config.train.prompts_per_step, config.parallel.dp
    if prompts % dp:
        nearest = max(dp, round(prompts / dp) * dp)
        problems.append(
            f"train.prompts_per_step = {prompts} is not a multiple of parallel.dp = {dp}"
            f" (each replica takes the same number of groups); nearest: {nearest}"
        )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > config.engine.context_length:
        problems.append(
            f"rollout.max_prompt_tokens + max_new_tokens = {longest} exceeds"
            f" engine.context_length = {config.engine.context_length}; set it to {longest} or more"
        )
    return problems


def _in_place_problems(config: Config) -> list[str]:
    """Of requests that go on with keys and values of old weights."""
    problems = []
    if "--disable-radix-cache" not in config.engine.extra_args:
        problems.append(
            'rollout.interrupt = "in_place" keeps keys and values of old weights, which the prefix cache'
            ' would hand on without end; add "--disable-radix-cache" to engine.extra_args, or use "retract"'
        )
    if config.algorithm.correction == "none":
        problems.append(
            'rollout.interrupt = "in_place" samples from a mixture of versions, which algorithm.correction ='
            ' "none" does not correct; use "truncated_is", or interrupt = "retract"'
        )
    return problems


def soundness_problems(config: Config) -> list[str]:
    """Combinations that would train on wrong numbers; one line each."""
    problems = []
    if config.rollout.interrupt == "in_place":
        problems += _in_place_problems(config)
    if config.rollout.max_staleness > 0 and config.algorithm.correction == "none":
        problems.append(
            f"rollout.max_staleness = {config.rollout.max_staleness} trains on stale samples, which"
            ' algorithm.correction = "none" does not correct; use "truncated_is" or max_staleness = 0'
        )
    if config.train.samples_per_prompt < 2:
        problems.append(
            f"algorithm.advantage = {config.algorithm.advantage!r} compares the samples of a group;"
            f" train.samples_per_prompt = {config.train.samples_per_prompt} leaves none; use 2 or more"
        )
    if config.data.path is not None and config.eval.num_tasks > 0 and config.eval.path is None:
        problems.append(
            "eval.num_tasks > 0 with data.path needs eval.path, the rows that are never trained on"
        )
    return problems
