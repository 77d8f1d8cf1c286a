"""Two real engines of TP 2 pass weights on to each other while they sample: bytes leave the trainer once.

A second engine is started for this, so it is for `make chaos-runs`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from asyncrl.engines.base import GenerateRequest, ReplicaLink, new_rid
from asyncrl.engines.sglang import SGLangEngine
from asyncrl.weights.cost import Strategy
from asyncrl.weights.groups import host_store
from asyncrl.weights.publisher import EngineEndpoint, Publisher
from asyncrl.weights.routes import Linked, ready_key
from tests.engine.conftest import (
    TIMEOUT_S_WEIGHTS,
    Reference,
    RunningEngine,
    assert_logprobs_equal,
    one_more_engine,
    trainer_of_one_rank,
)
from tests.engine.test_generate import PROMPT, start
from tests.engine.test_weights import connect

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def twin(model_dirs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    with one_more_engine(model_dirs[0], tmp_path_factory.mktemp("twin"), tp_size=2) as engine:
        yield engine


async def link(
    publisher: Publisher, engines: list[SGLangEngine], endpoints: list[EngineEndpoint], strategy: Linked
) -> None:
    """What coordinator and trainer do, while the engines sample."""
    store = host_store("127.0.0.1", 0, TIMEOUT_S_WEIGHTS)
    shared = 1, strategy, "127.0.0.1", store.port
    for replica, (engine, endpoint) in enumerate(zip(engines, endpoints, strict=True)):
        order = ReplicaLink(f"link-{strategy}", *shared, replica, len(engines), "gloo", TIMEOUT_S_WEIGHTS)
        await engine.link_replicas(endpoint.group_name, order)
    keys = [ready_key(f"link-{strategy}", replica, rank) for replica in (0, 1) for rank in (0, 1)]
    await asyncio.to_thread(store.wait, keys, timedelta(seconds=TIMEOUT_S_WEIGHTS))
    publisher.link([engine.name for engine in engines], 1, strategy)


@pytest.mark.parametrize("strategy", ["relay", "broadcast"])
async def test_linked_engines_pass_a_version_on_while_they_sample(
    running_engines: dict[str, RunningEngine],
    twin: RunningEngine,
    model_dirs: tuple[Path, Path],
    references: tuple[Reference, Reference],
    strategy: Linked,
) -> None:
    engines = [running_engines["tp2"].client(), SGLangEngine("tp2-twin", twin.url, twin.token)]
    wanted: Strategy = strategy
    with trainer_of_one_rank(model_dirs[1], wanted) as (publisher, _):
        endpoints = [await connect(engine, publisher) for engine in engines]
        assert publisher.linkable() == ("tp2", "tp2-twin")
        request = GenerateRequest(new_rid(), PROMPT, 400)
        early = [await start(engine, replace(request, rid=new_rid())) for engine in engines]
        await link(publisher, engines, endpoints, strategy)
        for engine, endpoint in zip(engines, endpoints, strict=True):
            hash_ = publisher.plan_hash(engine.name)
            await engine.stage_weights("device", endpoint.group_name, 1, hash_, TIMEOUT_S_WEIGHTS)
        sending = await asyncio.to_thread(publisher.begin, endpoints, 1, staged=True)
        assert sending.together == {"tp2", "tp2-twin"}
        stats = await asyncio.to_thread(publisher.finish, sending)
        assert stats.failures == () and stats.bytes_received_total == 2 * stats.bytes_sent
        late = [await start(engine, replace(request, rid=new_rid())) for engine in engines]
        for engine, endpoint in zip(engines, endpoints, strict=True):
            await engine.pause("retract")
            await engine.receive_weights("take", endpoint.group_name, 1, "", TIMEOUT_S_WEIGHTS)
            await engine.resume()
        for task in early:  # it may have ended while the version was on its way
            assert (await task).segments[0].policy_version == 0
        for task in late:
            assert (await task).segments[-1].policy_version == 1
        published = [await engine.checksums() for engine in engines]
        for engine, held in zip(engines, published, strict=True):
            assert_logprobs_equal(await engine.logprobs(PROMPT * 4), references[1].logprobs(PROMPT * 4))
            await engine.pause("abort")
            await engine.update_from_disk(str(model_dirs[1]), 2, TIMEOUT_S_WEIGHTS)
            assert await engine.checksums() == held
            await engine.update_from_disk(str(model_dirs[0]), 0, TIMEOUT_S_WEIGHTS)
            await engine.resume()
            publisher.disconnect(engine.name)
        for engine, endpoint in zip(engines, endpoints, strict=True):
            await engine.leave_weight_group(endpoint.group_name)
            await engine.close()
