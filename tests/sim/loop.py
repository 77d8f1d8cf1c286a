"""An asyncio event loop that explores schedules: virtual time, one random ready callback per step.

The same seed gives the same schedule, on any machine and in any process. No thread, socket or real clock
takes part; time moves only when nothing is ready, so a run of hours takes milliseconds. When nothing is
ready and no timer is set while the program still waits, that is a deadlock and raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
from asyncio import base_events
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Everybody waits and nothing will wake anybody."""


class SimTask(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address, so that schedules replay."""

    _next_number = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        SimTask._next_number += 1
        self._number = SimTask._next_number
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class SimLoop(base_events.BaseEventLoop):
    """``rng`` decides the schedule; a program may draw its own faults from it, too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        SimTask._next_number = 0
        self.rng = random.Random(seed)
        self.steps = 0
        self.max_executor_delay_s = 0.02  # how slow the threads, that is the disks, are
        self._now = 0.0
        self._clock_resolution = 1e-9
        self.set_task_factory(lambda loop, coro, **kw: SimTask(coro, loop=loop, **kw))

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run ``func`` after a random delay, as a thread would, but at one point of the schedule."""
        done: asyncio.Future[T] = self.create_future()

        def work() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(func(*args))
            except Exception as error:  # handed to whoever awaits, as an executor does
                done.set_exception(error)

        self.call_later(self.rng.random() * self.max_executor_delay_s, work)
        return done

    def _run_once(self) -> None:
        while self._scheduled and self._scheduled[0].cancelled():
            heapq.heappop(self._scheduled)._scheduled = False
        if not self._ready:
            if not self._scheduled:
                if self._stopping:
                    return
                raise Deadlock(f"nothing can happen any more at {self._now:.3f} s")
            self._now = max(self._now, self._scheduled[0].when())
        while self._scheduled and self._scheduled[0].when() <= self._now:
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False
            self._ready.append(timer)
        self._ready.rotate(-self.rng.randrange(len(self._ready)))
        handle = self._ready.popleft()
        self.steps += 1
        if not handle.cancelled():
            handle._run()

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no events from outside."""

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""


def simulate(seed: int, program: Callable[[SimLoop], Coroutine[Any, Any, T]]) -> T:
    """Run ``program`` to its end under schedule ``seed``."""
    loop = SimLoop(seed)
    try:
        return loop.run_until_complete(program(loop))
    finally:
        leftover = asyncio.all_tasks(loop)
        for task in leftover:
            task.cancel()
        if leftover:
            with contextlib.suppress(Deadlock):
                loop.run_until_complete(asyncio.wait(leftover))
        loop.close()
