"""Waits that end: each has a deadline and says whom it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class RolloutError(RuntimeError):
    """Rollouts cannot go on; one line that says why and what to do."""


class Progress:
    """One signal for everything that happens in a rollouter: versions, tokens, rewards, releases.

    Not thread-safe: one event loop owns it.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiters: dict[asyncio.Future[None], None] = {}  # a set that wakes in order of arrival

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    def notify(self) -> None:
        """Something happened: let every waiter look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_until(self, condition: Callable[[], bool], waiting_for: Callable[[], str]) -> None:
        """Return once ``condition`` holds; it is looked at again after every `notify`.

        Raises:
            RolloutError: nothing at all happened for the time-out; ``waiting_for`` names the culprit.
        """
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            try:
                await within(self._timeout_s, waiter, waiting_for)
            finally:
                del self._waiters[waiter]


async def within(timeout_s: float, work: Awaitable[T], waiting_for: Callable[[], str]) -> T:
    """The result of ``work``; raises RolloutError naming ``waiting_for()`` after ``timeout_s``."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await work
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise RolloutError(f"waited {timeout_s:g} s for {waiting_for()}") from error


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of a task group's failures: what went wrong before its consequences."""
    first = failures.exceptions[0]
    return first_failure(first) if isinstance(first, BaseExceptionGroup) else first


def loop_time() -> float:
    """Seconds on the running event loop's clock."""
    return asyncio.get_running_loop().time()
