"""A mixture of experts in a real engine of TP 2 and EP 2: what is published equals a load from disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from asyncrl.engines.sglang import SGLangEngine
from asyncrl.weights.publisher import Publisher
from tests.engine.conftest import (
    TIMEOUT_S_WEIGHTS,
    RunningEngine,
    start_engine,
    trainer_of_one_rank,
    until_ready,
)
from tests.engine.test_weights import connect, publish
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("moe")
    first, second = (make_tiny("qwen3_moe", directory / f"v{seed}", seed=seed) for seed in (0, 1))
    return first, second


@pytest.fixture(scope="module")
def running(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """TP 2, each rank with half of the experts, whole."""
    engine = start_engine(models[0], tmp_path_factory.mktemp("moe-log"), tp_size=2, extra=("--ep-size", "2"))
    try:
        asyncio.run(until_ready(engine))
        yield engine
    finally:
        engine.kill()


@pytest.fixture
async def engine(running: RunningEngine) -> AsyncIterator[SGLangEngine]:
    client = running.client()
    yield client
    await client.close()


@pytest.fixture
def publisher(models: tuple[Path, Path]) -> Iterator[Publisher]:
    """Of a trainer that holds version 1."""
    with trainer_of_one_rank(models[1]) as (publisher, _):
        yield publisher


async def test_publication_equals_a_load_from_disk(
    engine: SGLangEngine, publisher: Publisher, models: tuple[Path, Path]
) -> None:
    before = await engine.checksums()
    endpoint = await connect(engine, publisher, ep_size=2)
    await engine.pause("abort")
    await publish(engine, publisher, endpoint, 1, publisher.plan_hash(engine.name))
    published = await engine.checksums()
    publisher.disconnect(engine.name)
    await engine.leave_weight_group(endpoint.group_name)
    await engine.update_from_disk(str(models[1]), 2, TIMEOUT_S_WEIGHTS)
    from_disk = await engine.checksums()
    for rank, (wire, disk, old) in enumerate(zip(published, from_disk, before, strict=True)):
        assert wire.keys() == disk.keys()
        assert any("w13" in name for name in disk), f"rank {rank} holds no experts"
        for name, checksum in disk.items():
            assert wire[name] == checksum, f"rank {rank}: {name} differs from a load from disk"
            assert "cos_sin" in name or old[name] != checksum, f"rank {rank}: {name} did not change"
