"""The process in which a reward function runs, so that even a CPU loop in it can be stopped.

    stdin: one JSON request per line -> call -> the saved stdout: one JSON reply per line

First reply: ``{"ready": true, "concurrent": bool}`` or ``{"ready": false, "error": text}``. What user code
prints goes to standard error. The process ends at the end of its input, and with its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import importlib.util
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from asyncrl.rewards.base import RewardResult, as_result, failed
from asyncrl.rewards.forms import Request, call_arguments, recognise

PR_SET_PDEATHSIG = 1
REASONING_GYM = "reasoning_gym"


def load_function(spec: str) -> Callable[..., Any]:
    """Import ``FILE.py:FUNCTION``, or the built-in ``reasoning_gym``; what it raises is let through.

    Raises:
        FileNotFoundError: no such file.
        AttributeError: the file defines no such function.
    """
    if spec == REASONING_GYM:
        return _reasoning_gym
    file_name, _, name = spec.rpartition(":")
    file = Path(file_name).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    module_spec = importlib.util.spec_from_file_location(f"user_reward_{file.stem}", file)
    if module_spec is None or module_spec.loader is None:
        raise FileNotFoundError(f"not a Python file: {file}")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and typing look their module up here
    sys.path.insert(0, str(file.parent))
    module_spec.loader.exec_module(module)
    if name not in vars(module):
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise AttributeError(f"no function {name!r}; it defines {', '.join(defined) or 'none'}")
    function: Callable[..., Any] = vars(module)[name]
    return function


def _reasoning_gym(completion: str, row: Mapping[str, Any]) -> float:
    from asyncrl.data import reasoning_gym

    if REASONING_GYM not in row:
        raise ValueError('reward.function = "reasoning_gym" needs data.reasoning_gym')
    return reasoning_gym.score(row[REASONING_GYM], completion)


def where(error: BaseException, file: str) -> str:
    """``file:line: Type: message`` of an exception, at the innermost line of the user's own file."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f"{file}:{frames[-1].lineno}" if frames else file
    return f"{place}: {type(error).__name__}: {error}"


class Worker:
    """Scores requests one after another, or concurrently where the function is a coroutine."""

    def __init__(self, function: Callable[..., Any], file: str, replies: TextIO) -> None:
        self._function = function
        self._file = file
        self._form = recognise(function)
        self._replies = replies
        self.concurrent = inspect.iscoroutinefunction(function)

    async def serve(self, requests: asyncio.StreamReader) -> None:
        self.reply({"ready": True, "concurrent": self.concurrent})
        running: set[asyncio.Task[None]] = set()
        while line := await requests.readline():
            message = json.loads(line)
            if self.concurrent:
                task = asyncio.create_task(self._answer(message))
                running.add(task)
                task.add_done_callback(running.discard)
            else:
                await self._answer(message)
        for task in running:
            task.cancel()

    async def _answer(self, message: dict[str, Any]) -> None:
        result = await self._score(Request(**message["request"]))
        self.reply({"id": message["id"], "result": dataclasses.asdict(result)})

    async def _score(self, request: Request) -> RewardResult:
        try:
            value = self._function(**call_arguments(self._function, self._form, request))
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:
            return failed(where(error, self._file))
        return as_result(_plain_numbers(value))

    def reply(self, message: dict[str, Any]) -> None:
        self._replies.write(json.dumps(message) + "\n")
        self._replies.flush()


def _plain_numbers(value: Any) -> Any:
    """NumPy and torch scalars as Python numbers, also inside the list or dict that was returned."""
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_numbers(item) for item in value]
    if hasattr(value, "item") and getattr(value, "size", None) == 1:
        return value.item()
    return value


def main(spec: str) -> int:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    file = spec if spec == REASONING_GYM else str(Path(spec.rpartition(":")[0]).resolve())
    try:
        worker = Worker(load_function(spec), file, replies)
    except Exception as error:
        replies.write(json.dumps({"ready": False, "error": where(error, file)}) + "\n")
        replies.flush()
        return 1
    asyncio.run(_serve(worker))
    return 0


async def _serve(worker: Worker) -> None:
    reader = asyncio.StreamReader(limit=1 << 26)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await worker.serve(reader)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
