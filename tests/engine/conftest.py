"""Real SGLang engines on the CPU, started once per session: TP 1 and TP 2, of the same tiny model.

Each test gets a client of its own; afterwards the engine is running again and serves version 0 of the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from asyncrl.config import EngineConfig
from asyncrl.engines.ports import free_port
from asyncrl.engines.process import EngineCommand, engine_command, wait_until_ready
from asyncrl.engines.sglang import SGLangEngine
from asyncrl.weights.cost import Strategy
from asyncrl.weights.geometry import ModelGeometry
from asyncrl.weights.hf import read_shards
from asyncrl.weights.megatron_layout import MegatronCoord, megatron_shards
from asyncrl.weights.publisher import Publisher
from tests.tiny_models import make_tiny

START_TIMEOUT_S = 240.0
TIMEOUT_S_WEIGHTS = 60.0
REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class RunningEngine:
    """A server process, which leads a process group of its own."""

    name: str
    url: str
    token: str
    tp_size: int
    process: subprocess.Popen[bytes]
    log: Path

    def client(self) -> SGLangEngine:
        return SGLangEngine(self.name, self.url, self.token)

    def kill(self) -> None:
        """End the server and what it has started."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


def start_engine(model: Path, directory: Path, *, tp_size: int, extra: tuple[str, ...] = ()) -> RunningEngine:
    """Start a server; it is not ready yet."""
    name, port, token = f"tp{tp_size}", free_port(), secrets.token_hex(16)
    config = EngineConfig(tp=tp_size, extra_args=extra)
    command = engine_command(
        config, model_path=model, dtype="float32", port=port, token=token, device="cpu", join_timeout_s=60
    )
    log = directory / f"{name}-{port}.log"
    return RunningEngine(name, f"http://127.0.0.1:{port}", token, tp_size, start_process(command, log), log)


@contextlib.contextmanager
def trainer_of_one_rank(
    model: Path, strategy: Strategy = "p2p"
) -> Iterator[tuple[Publisher, dict[str, torch.Tensor]]]:
    """A trainer that holds the whole model, and its tensors."""
    geometry = ModelGeometry.from_hf(model)
    layers = tuple(range(1, geometry.num_layers + 1))
    coord = MegatronCoord(1, 0, layers, has_embedding=True, has_output=True, padded_vocab=384)
    shards = megatron_shards(geometry, coord)
    tensors = {shard.name: torch.zeros(shard.shape) for shard in shards}
    read_shards(model, shards, tensors)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    size = 0, 1, shards, tensors, geometry, 64 << 10, TIMEOUT_S_WEIGHTS
    yield Publisher(*size, choose=lambda plan: strategy), tensors
    dist.destroy_process_group()


def start_process(command: EngineCommand, log: Path) -> subprocess.Popen[bytes]:
    """Under a warden, which ends all of it, and removes its shared memory, when its stdin is closed."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "asyncrl.launch.warden", "--grace", "0", "--", *command.arguments],
            env={**os.environ, "PYTHONPATH": str(REPO), **command.environment},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


async def until_ready(running: RunningEngine) -> None:
    engine = running.client()
    try:
        await wait_until_ready(
            engine, exit_status=running.process.poll, log=running.log, timeout_s=START_TIMEOUT_S
        )
    finally:
        await engine.close()


@contextlib.contextmanager
def one_more_engine(
    model: Path, directory: Path, *, tp_size: int, extra: tuple[str, ...] = ()
) -> Iterator[RunningEngine]:
    """An engine beside those that all tests share."""
    engine = start_engine(model, directory, tp_size=tp_size, extra=extra)
    try:
        asyncio.run(until_ready(engine))
        yield engine
    finally:
        engine.kill()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test that kills an engine comes after all that use it."""
    items.sort(key=lambda item: item.path.name == "test_death.py")


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Versions 0 and 1 of a model whose vocabulary (272) needs padding; samples end by their length."""
    directory = tmp_path_factory.mktemp("models")
    first, second = (make_tiny("qwen3", directory / f"v{seed}", seed=seed, ends=False) for seed in (0, 1))
    return first, second


@pytest.fixture(scope="session")
def running_engines(
    model_dirs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RunningEngine]]:
    """The engines by name; the TP 1 engine samples from seeds."""
    directory = tmp_path_factory.mktemp("engines")
    engines = [
        start_engine(model_dirs[0], directory, tp_size=1, extra=("--enable-deterministic-inference",)),
        start_engine(model_dirs[0], directory, tp_size=2),
    ]

    async def all_ready() -> None:
        await asyncio.gather(*(until_ready(engine) for engine in engines))

    try:
        asyncio.run(all_ready())
        yield {engine.name: engine for engine in engines}
    finally:
        for engine in engines:
            engine.kill()


@pytest.fixture(params=["tp1", "tp2"])
async def engine(
    request: pytest.FixtureRequest,
    running_engines: dict[str, RunningEngine],
    model_dirs: tuple[Path, Path],
) -> AsyncIterator[SGLangEngine]:
    """A client of the TP 1 and of the TP 2 engine, one after the other."""
    client = running_engines[request.param].client()
    yield client
    await client.pause("abort")
    if await client.version() != 0:
        await client.update_from_disk(str(model_dirs[0]), 0, 60)
    await client.resume()
    await client.close()


class Reference:
    """A model in transformers, fp32: what its logprobs and greedy tokens should be."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    @torch.no_grad()
    def logprobs(self, token_ids: list[int] | tuple[int, ...]) -> list[float]:
        """log p(token i | tokens before i), i = 1 .. T-1."""
        logits = self._model(torch.tensor([token_ids])).logits[0]
        targets = torch.tensor(token_ids[1:])
        return torch.log_softmax(logits[:-1], -1).gather(1, targets[:, None])[:, 0].tolist()


@pytest.fixture(scope="session")
def references(model_dirs: tuple[Path, Path]) -> tuple[Reference, Reference]:
    return Reference(model_dirs[0]), Reference(model_dirs[1])


def assert_logprobs_equal(actual: list[float], expected: list[float], tolerance: float = 1e-4) -> None:
    """Compare per token and name the first that differs."""
    assert len(actual) == len(expected), f"{len(actual)} logprobs, expected {len(expected)}"
    for position, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert abs(got - wanted) < tolerance, f"logprob {position}: {got}, expected {wanted}"
