"""A wait that a stall of the whole machine does not use up: it costs one step."""

from __future__ import annotations

import asyncio

STEP_S = 0.01


async def idle(seconds: float) -> None:
    """Let everything else run for ``seconds``, step by step."""
    for _ in range(round(seconds / STEP_S)):
        await asyncio.sleep(STEP_S)
