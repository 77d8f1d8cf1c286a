"""Waits and bounds on time that a stall of the whole machine does not use up: it costs them one step.

A bound counts what the loop was given to run in, so it is as strict as the clock wherever the machine runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
STEP_S = 0.01


async def idle(seconds: float) -> None:
    """Let everything else run for ``seconds``, step by step."""
    for _ in range(round(seconds / STEP_S)):
        await asyncio.sleep(STEP_S)


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """Its result.

    Raises:
        TimeoutError: it had none after ``seconds`` of steps; it is cancelled.
    """
    task = asyncio.ensure_future(awaitable)
    for _ in range(round(seconds / STEP_S)):
        await asyncio.wait({task}, timeout=STEP_S)
        if task.done():
            return task.result()
    task.cancel()
    raise TimeoutError(f"no result within {seconds:g} s")
