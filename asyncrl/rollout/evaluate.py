"""Greedy accuracy on held-out prompts through the running engines, before, beside or after training.

    prompts --(bounded number at a time)--> router --> engine --> step --> reward --> EvalResult

Nothing is journaled: an evaluation that dies is run again. An interruption for a publication continues
from the prefix as in training, so an evaluation beside training may span two policy versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.engines.base import Engine, EngineError, GenerateRequest, new_rid
from asyncrl.rewards.base import Reward
from asyncrl.rollout.rewarding import Decode
from asyncrl.rollout.router import Router
from asyncrl.rollout.trajectory import Generate, Generated, Lost, Submit, Trajectory, TrajectorySpec, step
from asyncrl.rollout.waiting import RolloutError, first_failure, loop_time
from asyncrl.types import Prompt

CORRECT_SCORE = 1.0 - 1e-6
"""A completion is correct from this score on."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """``accuracy``: share of tasks with a score of 1 or more; ``mean_tokens``: new tokens per task."""

    accuracy: float
    mean_score: float
    num_tasks: int
    mean_tokens: float
    seconds: float


async def evaluate(
    *,
    engines: Mapping[str, Engine],
    prompts: Sequence[Prompt],
    reward: Reward,
    decode: Decode,
    max_new_tokens: int,
    stop_token_ids: tuple[int, ...],
    max_concurrent: int,
    timeout_s: float,
) -> EvalResult:
    """Sample every prompt greedily and score it; ``timeout_s`` bounds one request.

    Raises:
        RolloutError: there is no prompt, no engine is left, or a reward failed (an accuracy over the rest
            would be of other tasks than the one it is compared with).
    """
    if not prompts:
        raise RolloutError("there is no held-out prompt; set eval.num_tasks to 1 or more")
    router = Router(engines, loop_time)
    slots = asyncio.Semaphore(max_concurrent)
    began = loop_time()

    async def solve(prompt: Prompt) -> tuple[float, int]:
        async with slots:
            spec = TrajectorySpec(prompt.token_ids, max_new_tokens, stop_token_ids)
            trajectory = await _greedy(Trajectory(spec), router, timeout_s)
        token_ids = trajectory.new_token_ids
        result = await reward.score(prompt, decode(token_ids), token_ids)
        if result.score is None:
            raise RolloutError(f"the reward of held-out prompt {prompt.prompt_idx} failed: {result.error}")
        return result.score, len(token_ids)

    try:
        async with asyncio.TaskGroup() as tasks:
            solved = [tasks.create_task(solve(prompt)) for prompt in prompts]
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None
    scores = [task.result()[0] for task in solved]
    return EvalResult(
        accuracy=sum(score >= CORRECT_SCORE for score in scores) / len(scores),
        mean_score=sum(scores) / len(scores),
        num_tasks=len(scores),
        mean_tokens=sum(task.result()[1] for task in solved) / len(solved),
        seconds=loop_time() - began,
    )


async def _greedy(trajectory: Trajectory, router: Router, timeout_s: float) -> Trajectory:
    """Finish a trajectory at temperature 0, over as many requests as it takes."""
    while not trajectory.finished:
        name, engine = router.acquire(None)
        trajectory, (action,) = step(trajectory, Submit())
        if not isinstance(action, Generate):
            raise RolloutError("multi-turn environments are not connected to the evaluation")
        request = GenerateRequest(
            rid=new_rid(),
            token_ids=action.token_ids,
            max_new_tokens=action.max_new_tokens,
            temperature=0.0,
            stop_token_ids=trajectory.spec.stop_token_ids,
        )
        try:
            generation = await engine.generate(request, timeout_s)
        except EngineError as error:
            router.failed(name, engine, str(error))
            trajectory, _ = step(trajectory, Lost())
            continue
        finally:
            router.release(name, engine)
        router.succeeded(name, engine)
        trajectory, _ = step(trajectory, Generated(generation.segments, generation.finish))
    return trajectory
