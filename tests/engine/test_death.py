"""An engine that dies in service is noticed within seconds. Runs last: it takes an engine with it."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
import pytest

from asyncrl.engines.base import INTERRUPTED, EngineError
from tests.engine.conftest import RunningEngine
from tests.engine.test_generate import greedy, start


async def test_death_of_the_scheduler_hands_back_what_was_sampled_and_is_an_error_from_then_on(
    running_engines: dict[str, RunningEngine],
) -> None:
    running = running_engines["tp1"]
    engine = running.client()
    task = await start(engine, greedy(1500))
    await asyncio.sleep(0.3)
    children = psutil.Process(running.process.pid).children(recursive=True)
    scheduler = next(child for child in children if "scheduler" in child.name())
    started = time.monotonic()
    os.kill(scheduler.pid, signal.SIGKILL)
    generation = await task
    assert time.monotonic() - started < 20
    assert generation.finish == INTERRUPTED and 0 < len(generation.token_ids) < 1500
    assert len(generation.logprobs) == len(generation.token_ids)
    with pytest.raises(EngineError, match=r"^engine tp1 at http://127.0.0.1:\d+ does not answer"):
        await engine.generate(greedy(4), 20)
    with pytest.raises(EngineError, match=r"^engine tp1 at http://127.0.0.1:\d+ does not answer"):
        await engine.version()
    assert not await engine.ready()
    await engine.close()
