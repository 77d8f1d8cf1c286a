"""From ``reward.function`` to a `Reward`: built in, reasoning-gym, or a function in a user's file.

    score() -> free worker process -> JSON line in, JSON line out -> RewardResult
                     `-- no reply within timeout_s: the process is killed, the next call starts another

User code and reasoning-gym (whose scorers parse model output) run in worker processes, so a loop in
them costs one sample and not the run. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config import RewardConfig
from asyncrl.rewards.base import Reward, RewardError, RewardResult, failed
from asyncrl.rewards.builtin import BUILTIN, BuiltinReward
from asyncrl.rewards.process import WorkerDied, WorkerProcess
from asyncrl.rewards.worker import REASONING_GYM
from asyncrl.types import Prompt

START_TIMEOUT_S = 120.0
MAX_CONCURRENT = 64
ATTEMPTS = 3


async def open_reward(config: RewardConfig) -> Reward:
    """The reward that ``config.function`` names, started and ready.

    Raises:
        RewardError: no such reward, or its file cannot be imported (with file and line).
    """
    if config.function in BUILTIN:
        return BuiltinReward(BUILTIN[config.function])
    if config.function != REASONING_GYM and ".py:" not in config.function:
        known = ", ".join([*BUILTIN, REASONING_GYM])
        raise RewardError(f"reward.function = {config.function!r}: use {known} or FILE.py:FUNCTION")
    reward = WorkerReward(config.function, config.timeout_s)
    await reward.start()
    return reward


class WorkerReward:
    """A reward in a worker process; one call at a time, or up to `MAX_CONCURRENT` of a coroutine function.

    Not thread-safe: to be used from one event loop.
    """

    def __init__(self, function: str, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._process: WorkerProcess | None = None
        self._starting = asyncio.Lock()
        self._places = asyncio.Semaphore(1)

    async def start(self) -> None:
        """Start the worker, once, to learn whether the function can be imported.

        Raises:
            RewardError: it cannot.
        """
        process = await self._running()
        if process.concurrent:
            self._places = asyncio.Semaphore(MAX_CONCURRENT)

    async def score(self, prompt: Prompt, completion: str, token_ids: tuple[int, ...]) -> RewardResult:
        """Score one completion; a time-out, an exception or a death of the worker is the result's error."""
        request = {
            "messages": [dict(message) for message in prompt.messages],
            "prompt_ids": prompt.token_ids,
            "row": dict(prompt.row),
            "completion": completion,
            "token_ids": token_ids,
        }
        async with self._places:
            for _ in range(ATTEMPTS):
                process = await self._running()
                try:
                    return await asyncio.wait_for(process.call(request), self._timeout_s)
                except TimeoutError:
                    await process.kill()
                    return failed(
                        f"{self._function}: no result within reward.timeout_s = {self._timeout_s:g}"
                    )
                except WorkerDied as error:
                    if not error.by_us:
                        return failed(f"{self._function}: {error}")
                    # killed for another call's time-out: this call was not to blame and is made again
        return failed(f"{self._function}: its worker was killed {ATTEMPTS} times for other calls' time-outs")

    async def close(self) -> None:
        if self._process is not None:
            await self._process.kill()

    async def _running(self) -> WorkerProcess:
        async with self._starting:
            if self._process is None or not self._process.alive:
                self._process = await WorkerProcess.start(self._function, START_TIMEOUT_S)
            return self._process


@dataclass(frozen=True, slots=True)
class Trial:
    """One completion tried on a reward, before any training."""

    prompt: Prompt
    completion: str
    result: RewardResult


async def try_reward(
    config: RewardConfig, prompts: Sequence[Prompt], completions: Sequence[str] | None = None
) -> list[Trial]:
    """Score ``completions`` (one per prompt), or each row's own answer and an empty text.

    Raises:
        RewardError: the reward cannot be loaded.
    """
    if completions is not None:
        cases = list(zip(prompts, completions, strict=True))
    else:
        cases = [(prompt, text) for prompt in prompts for text in (_answer_text(prompt), "")]
    reward = await open_reward(config)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(reward.close)
        return [Trial(prompt, text, await reward.score(prompt, text, ())) for prompt, text in cases]


def _answer_text(prompt: Prompt) -> str:
    answer: Any = prompt.row.get("answer")
    return "" if answer is None else str(answer)
