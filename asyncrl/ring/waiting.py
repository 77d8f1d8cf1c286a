"""Waiting in asyncio without a thread: a FIFO that the ring writes to when something happened.

The core arms the FIFO under the lock of the attempt that failed, so nothing is missed in between. A process
may die after it changed the ring and before it wrote; so no wait is longer than `SLICE_S`. A wake-up of an
idle event loop costs up to 0.4 ms: a shorter slice would use more than 0.1% of a core.
"""

from __future__ import annotations

import asyncio
import os

SLICE_S = 0.5


class FifoWaiter:
    """All coroutines of one handle that wait on one event loop."""

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop) -> None:
        self._fd = fd
        self._loop = loop
        self._event = asyncio.Event()
        loop.add_reader(fd, self._drain)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def prepare(self) -> asyncio.Event:
        """Call before an attempt, and hand to `wait` if it fails."""
        return self._event

    async def wait(self, event: asyncio.Event, timeout: float) -> None:
        """Return when the ring changed after `prepare`, or after ``timeout`` or a slice."""
        timer = self._loop.call_later(min(timeout, SLICE_S), self._wake, event)
        try:
            await event.wait()
        finally:
            timer.cancel()

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _drain(self) -> None:
        try:
            while os.read(self._fd, 4096):
                pass
        except BlockingIOError:
            pass
        self._wake(self._event)

    def _wake(self, event: asyncio.Event) -> None:
        """Let all look again who wait for ``event``; who prepares from now on waits for another."""
        if event is self._event:
            self._event = asyncio.Event()
        event.set()
