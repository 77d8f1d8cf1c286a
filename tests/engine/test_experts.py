"""Mixtures of experts in real engines of TP 2, one with latent attention: what is published equals a load
from disk. SGLang on a CPU loads experts under EP, and cannot compute them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from asyncrl.engines.sglang import SGLangEngine
from asyncrl.weights.publisher import EngineEndpoint, Publisher
from tests.engine.conftest import (
    TIMEOUT_S_WEIGHTS,
    RunningEngine,
    assert_logprobs_equal,
    start_engine,
    trainer_of_one_rank,
    until_ready,
)
from tests.engine.test_weights import connect, publish
from tests.tiny_models import Kind, make_tiny

pytestmark = pytest.mark.long


PROMPT = tuple(range(40, 60))


@dataclass(frozen=True)
class Served:
    """A model, how an engine holds it, and whether that engine can compute it."""

    kind: Kind
    ep_size: int
    computes: bool
    extra: tuple[str, ...] = ()


# Latent attention is computed by torch alone where every sequence is, as determinism asks.
LATENT = Served("deepseek_v3", 1, computes=True, extra=("--enable-deterministic-inference",))
SERVED = (Served("qwen3_moe", 2, computes=False, extra=("--ep-size", "2")), LATENT)


@pytest.fixture(scope="module", params=SERVED, ids=[served.kind for served in SERVED])
def served(request: pytest.FixtureRequest) -> Served:
    return cast(Served, request.param)


@pytest.fixture(scope="module")
def models(served: Served, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp(served.kind)
    first, second = (make_tiny(served.kind, directory / f"v{seed}", seed=seed) for seed in (0, 1))
    return first, second


@pytest.fixture(scope="module")
def running(
    served: Served, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEngine]:
    engine = start_engine(models[0], tmp_path_factory.mktemp("log"), tp_size=2, extra=served.extra)
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


@pytest.mark.parametrize("staged", [False, True], ids=["published", "staged"])
async def test_publication_equals_a_load_from_disk(
    served: Served, engine: SGLangEngine, publisher: Publisher, models: tuple[Path, Path], staged: bool
) -> None:
    """Every parameter, and what the engine derives from them: latent attention multiplies by w_kc and w_vc,
    which no parameter holds."""
    before = await engine.checksums()
    endpoint = await connect(engine, publisher, served.ep_size)
    await bring(engine, publisher, endpoint, staged=staged)
    published = await engine.checksums()
    logprobs = await engine.logprobs(PROMPT) if served.computes else []
    await load(engine, models[1], version=2)
    from_disk = await engine.checksums()
    assert_logprobs_equal(logprobs, await engine.logprobs(PROMPT) if served.computes else [])
    for rank, (wire, disk, old) in enumerate(zip(published, from_disk, before, strict=True)):
        assert wire.keys() == disk.keys()
        assert any("w13" in name for name in disk), f"rank {rank} holds no experts"
        for name, checksum in disk.items():
            assert wire[name] == checksum, f"rank {rank}: {name} differs from a load from disk"
            assert "cos_sin" in name or old[name] != checksum, f"rank {rank}: {name} did not change"
    await load(engine, models[0], version=0)


async def bring(
    engine: SGLangEngine, publisher: Publisher, endpoint: EngineEndpoint, *, staged: bool
) -> None:
    """Version 1; then leave the weight group."""
    plan_hash = publisher.plan_hash(engine.name)
    if staged:
        await engine.stage_weights("device", endpoint.group_name, 1, plan_hash, TIMEOUT_S_WEIGHTS)
        sending = await asyncio.to_thread(publisher.begin, [endpoint], 1, staged=True)
        assert (await asyncio.to_thread(publisher.finish, sending)).failures == ()
        await engine.pause("abort")
        await engine.receive_weights("take", endpoint.group_name, 1, plan_hash, TIMEOUT_S_WEIGHTS)
    else:
        await engine.pause("abort")
        await publish(engine, publisher, endpoint, 1, plan_hash)
    await engine.resume()
    publisher.disconnect(engine.name)
    await engine.leave_weight_group(endpoint.group_name)


async def load(engine: SGLangEngine, model: Path, version: int) -> None:
    await engine.pause("abort")
    await engine.update_from_disk(str(model), version, TIMEOUT_S_WEIGHTS)
    await engine.resume()
