"""How an SGLang engine is started and when it may be used; starting and ending it is the supervisor's part.

EngineConfig -> EngineCommand (arguments and environment) -> [supervisor starts it] -> wait_until_ready
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from asyncrl.config import EngineConfig
from asyncrl.engines.base import Engine, EngineError

Device = Literal["cpu", "cuda"]

POLL_INTERVAL_S: Final = 0.25
LOG_LINES: Final = 20


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What to execute, with which variables on top of the caller's environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def engine_command(
    config: EngineConfig,
    *,
    model_path: Path,
    dtype: str,
    port: int,
    token: str,
    device: Device,
    num_threads: int = 1,
    join_timeout_s: float = 120.0,
    host: str = "127.0.0.1",
) -> EngineCommand:
    """The command of one engine.

    Args:
        dtype: ``float32`` or ``bfloat16``, of weights and KV cache.
        token: what clients must present; travels in the environment, where other users cannot read it.
        num_threads: OpenMP threads of each tensor-parallel rank on a CPU.
        join_timeout_s: longest wait of the engine for the other members of a weight group.
    """
    arguments = [
        *(sys.executable, "-m", "asyncrl.engines.launcher"),
        *("--model-path", str(model_path), "--dtype", dtype),
        *("--host", host, "--port", str(port)),
        *("--tp-size", str(config.tp)),
        *("--context-length", str(config.context_length)),
        *("--max-running-requests", str(config.max_running_requests)),
        *("--weight-version", "0"),
        *("--sampling-defaults", "openai"),  # not the top-k of the model's generation_config.json
        "--skip-tokenizer-init",  # token ids go in and come out
        *(_cpu_arguments(config) if device == "cpu" else _cuda_arguments(config)),
        *config.extra_args,
    ]
    environment = {
        "ASYNCRL_ENGINE_TOKEN": token,
        "ASYNCRL_JOIN_TIMEOUT_S": f"{join_timeout_s:g}",
        "HF_HUB_OFFLINE": "1",
        **(_cpu_environment(config.tp, num_threads) if device == "cpu" else {}),
    }
    return EngineCommand(tuple(arguments), environment)


async def wait_until_ready(
    engine: Engine, *, exit_status: Callable[[], int | None], log: Path, timeout_s: float
) -> None:
    """Return when the engine answers.

    Args:
        exit_status: the process's exit status, or None while it runs.

    Raises:
        EngineError: the process ended, or is not ready after ``timeout_s``; with the end of its log.
    """
    deadline = time.monotonic() + timeout_s
    while not await engine.ready():
        status = exit_status()
        if status is not None:
            raise EngineError(f"engine {engine.name} ended with status {status} at start; {_log_end(log)}")
        if time.monotonic() > deadline:
            raise EngineError(f"engine {engine.name} not ready after {timeout_s:g} s; {_log_end(log)}")
        await asyncio.sleep(POLL_INTERVAL_S)


def _cpu_arguments(config: EngineConfig) -> list[str]:
    return [
        *("--device", "cpu", "--attention-backend", "torch_native"),
        # No reservation: the KV cache has the size below. SGLang refuses to start where more than this
        # fraction of the memory that was free at first is gone, and trainers start at the same time.
        *("--mem-fraction-static", "0.9"),
        *("--max-total-tokens", str(config.max_total_tokens or 8192)),
        "--skip-server-warmup",  # nothing is compiled or captured
        "--disable-overlap-schedule",  # nothing to overlap with; prefixes are cached a step earlier
        "--sleep-on-idle",  # an idle scheduler would otherwise take half a core from the trainer
    ]


def _cuda_arguments(config: EngineConfig) -> list[str]:
    if config.max_total_tokens is None:
        return []
    return ["--max-total-tokens", str(config.max_total_tokens)]


def _cpu_environment(tp_size: int, num_threads: int) -> dict[str, str]:
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": str(num_threads),
        # SGLang wants one entry per rank where ranks outnumber NUMA nodes; without sgl_kernel nothing is
        # bound to it.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * tp_size),
        "TORCH_COMPILE_DISABLE": "1",  # seeded sampling would spend the first request on compiling
    }


def _log_end(log: Path) -> str:
    if not log.exists():
        return f"it wrote no log at {log}"
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return f"the end of {log}:\n" + "\n".join(lines)
