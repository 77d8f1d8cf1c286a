"""The parent's end of a reward worker process: requests out, replies matched by id.

call() -> stdin;  stdout -> reader task -> the call's future;  end of stdout -> every open call fails
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from typing import Any

from asyncrl.rewards.base import RewardError, RewardResult

LINE_LIMIT = 1 << 26
PIPE_CLOSE_TIMEOUT_S = 5.0


class WorkerDied(RuntimeError):
    """The worker ended before it replied; ``by_us``: because it was killed for a time-out."""

    def __init__(self, message: str, *, by_us: bool) -> None:
        super().__init__(message)
        self.by_us = by_us


class WorkerProcess:
    """One running worker, owned by one event loop. Made by `start`, ended by `kill`."""

    def __init__(self, process: asyncio.subprocess.Process, *, concurrent: bool) -> None:
        self._process = process
        self.concurrent = concurrent
        self._ids = itertools.count()
        self._open: dict[int, asyncio.Future[RewardResult]] = {}
        self._killed = False
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, function: str, timeout_s: float) -> WorkerProcess:
        """Start a worker and wait until it has imported ``function``.

        Raises:
            RewardError: the import failed (with file and line), or took longer than ``timeout_s``.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "asyncrl.rewards.worker", function),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
            start_new_session=True,  # its own process group: a kill takes its children along
        )
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), timeout_s)
        except TimeoutError:
            await _kill_group(process)
            raise RewardError(f"{function}: importing it took longer than {timeout_s:g} s") from None
        if not line:
            raise RewardError(f"{function}: importing it: {await _ending(process)}")
        greeting = json.loads(line)
        if not greeting["ready"]:
            await _kill_group(process)
            raise RewardError(f"reward.function: {greeting['error']}")
        return cls(process, concurrent=greeting["concurrent"])

    @property
    def alive(self) -> bool:
        return not self._killed and not self._reader.done()

    async def call(self, request: dict[str, Any]) -> RewardResult:
        """Raises:
        WorkerDied: the worker ended before it replied.
        """
        assert self._process.stdin is not None
        number = next(self._ids)
        future: asyncio.Future[RewardResult] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        try:
            # a data row may hold dates or bytes; a reward receives those as text
            line = json.dumps({"id": number, "request": request}, default=str)
            self._process.stdin.write(line.encode() + b"\n")
            await self._process.stdin.drain()
            return await future
        except (BrokenPipeError, ConnectionResetError):
            raise WorkerDied(await _ending(self._process), by_us=self._killed) from None
        finally:
            self._open.pop(number, None)

    async def kill(self) -> None:
        """End the worker and its children; open calls fail with `WorkerDied`. May be called twice."""
        self._killed = True
        await _kill_group(self._process)
        # a child that user code moved out of the group may hold the pipe open; do not wait for it
        done, _ = await asyncio.wait({self._reader}, timeout=PIPE_CLOSE_TIMEOUT_S)
        if not done:
            self._reader.cancel()
            self._fail_open_calls(f"its worker process was killed by {signal.SIGKILL.name}")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            reply = json.loads(line)
            future = self._open.get(reply["id"])
            if future is not None and not future.done():
                future.set_result(RewardResult(**reply["result"]))
        self._fail_open_calls(await _ending(self._process))

    def _fail_open_calls(self, ending: str) -> None:
        for future in self._open.values():
            if not future.done():
                future.set_exception(WorkerDied(ending, by_us=self._killed))


async def _ending(process: asyncio.subprocess.Process) -> str:
    code = await process.wait()
    if code < 0:
        return f"its worker process was killed by {signal.Signals(-code).name}"
    return f"its worker process ended with exit code {code}"


async def _kill_group(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
