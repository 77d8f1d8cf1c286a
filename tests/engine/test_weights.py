"""New weights reach every rank of a real engine, and every token is attested to the weights that made it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.engines.base import EngineError, GenerateRequest, Generation, WeightGroup, new_rid
from asyncrl.engines.ports import free_port
from asyncrl.engines.sglang import SGLangEngine
from asyncrl.weights.publisher import EngineEndpoint, Publisher
from tests.engine.conftest import (
    TIMEOUT_S_WEIGHTS,
    Reference,
    assert_logprobs_equal,
    trainer_of_one_rank,
)
from tests.engine.test_generate import PROMPT, TIMEOUT_S, greedy, start


@pytest.fixture(scope="module")
def trainer(model_dirs: tuple[Path, Path]) -> Iterator[tuple[Publisher, dict[str, torch.Tensor]]]:
    """It holds version 1 of the model."""
    with trainer_of_one_rank(model_dirs[1]) as trainer:
        yield trainer


async def connect(engine: SGLangEngine, publisher: Publisher, ep_size: int = 1) -> EngineEndpoint:
    """Join trainer and engine in a weight group and agree on the plan."""
    tp_size = {"tp1": 1, "tp2": 2, "tp2-twin": 2}[engine.name]
    name = f"weights-{new_rid()}"
    endpoint = EngineEndpoint(engine.name, tp_size, name, "127.0.0.1", free_port(), ep_size)
    group = WeightGroup(
        endpoint.group_name, endpoint.master_address, endpoint.master_port, 1, 1 + tp_size, "gloo"
    )
    meeting = asyncio.create_task(asyncio.to_thread(publisher.connect, endpoint))
    await engine.join_weight_group(group, TIMEOUT_S_WEIGHTS)
    await engine.receive_weights("connect", endpoint.group_name, 0, "", TIMEOUT_S_WEIGHTS)
    await meeting
    return endpoint


@contextlib.asynccontextmanager
async def connected(engine: SGLangEngine, publisher: Publisher) -> AsyncIterator[EngineEndpoint]:
    """In a weight group for as long as it lasts: a test that fails leaves the engine to the next one."""
    endpoint = await connect(engine, publisher)
    try:
        yield endpoint
    finally:
        publisher.disconnect(engine.name)
        await engine.leave_weight_group(endpoint.group_name)


async def publish(
    engine: SGLangEngine, publisher: Publisher, endpoint: EngineEndpoint, version: int, plan_hash: str
) -> None:
    """Send and receive one version; the receiver's error wins."""
    sending = asyncio.create_task(asyncio.to_thread(publisher.publish, [endpoint], version))
    try:
        await engine.receive_weights("publish", endpoint.group_name, version, plan_hash, 10)
        stats = await sending
        assert stats.failures == ()
    finally:
        await asyncio.wait([sending])


def assert_attested(
    request: GenerateRequest, generation: Generation, references: tuple[Reference, Reference]
) -> None:
    """Every segment's logprobs are those of the weights of its version."""
    prefix = request.token_ids
    for segment in generation.segments:
        expected = references[segment.policy_version].logprobs(prefix + segment.token_ids)
        assert_logprobs_equal(list(segment.logprobs), expected[len(prefix) - 1 :])
        prefix += segment.token_ids


async def test_publication_equals_a_load_from_disk(
    engine: SGLangEngine,
    trainer: tuple[Publisher, dict[str, torch.Tensor]],
    model_dirs: tuple[Path, Path],
    references: tuple[Reference, Reference],
) -> None:
    publisher, _ = trainer
    before = await engine.checksums()
    async with connected(engine, publisher) as endpoint:
        await engine.pause("abort")
        await publish(engine, publisher, endpoint, 1, publisher.plan_hash(engine.name))
        await engine.resume()
        published = await engine.checksums()
        assert await engine.version() == 1
        assert_logprobs_equal(await engine.logprobs(PROMPT * 4), references[1].logprobs(PROMPT * 4))

        await engine.pause("abort")
        await engine.update_from_disk(str(model_dirs[1]), 2, TIMEOUT_S_WEIGHTS)
        from_disk = await engine.checksums()
        assert await engine.version() == 2
        for rank, (wire, disk, old) in enumerate(zip(published, from_disk, before, strict=True)):
            assert wire.keys() == disk.keys()
            for name, checksum in disk.items():
                assert wire[name] == checksum, f"rank {rank}: {name} differs from a load from disk"
                assert "cos_sin" in name or old[name] != checksum, f"rank {rank}: {name} did not change"


async def test_retract_across_an_update_attests_every_token(
    engine: SGLangEngine,
    trainer: tuple[Publisher, dict[str, torch.Tensor]],
    references: tuple[Reference, Reference],
) -> None:
    publisher, _ = trainer
    async with connected(engine, publisher) as endpoint:
        requests = [GenerateRequest(new_rid(), (*PROMPT, token), 400) for token in (1, 2, 3)]
        tasks = [await start(engine, request) for request in requests]
        await asyncio.sleep(0.3)
        await engine.pause("retract")
        await publish(engine, publisher, endpoint, 1, publisher.plan_hash(engine.name))
        await engine.resume()
        for request, task in zip(requests, tasks, strict=True):
            generation = await task
            assert [segment.policy_version for segment in generation.segments] == [0, 1]
            assert_attested(request, generation, references)


async def test_a_version_is_staged_while_the_engine_samples(
    engine: SGLangEngine,
    trainer: tuple[Publisher, dict[str, torch.Tensor]],
    references: tuple[Reference, Reference],
) -> None:
    publisher, _ = trainer
    async with connected(engine, publisher) as endpoint:
        plan_hash = publisher.plan_hash(engine.name)
        before = await engine.checksums()
        meanwhile = [
            await start(engine, GenerateRequest(new_rid(), (*PROMPT, token), 400)) for token in (1, 2)
        ]
        await engine.stage_weights("device", endpoint.group_name, 1, plan_hash, TIMEOUT_S_WEIGHTS)
        sending = await asyncio.to_thread(publisher.begin, [endpoint], 1, staged=True, from_copy=True)
        stats = await asyncio.to_thread(publisher.finish, sending)  # every rank has verified it
        assert stats.failures == ()
        assert await engine.checksums() == before and await engine.version() == 0
        for task in meanwhile:
            assert [segment.policy_version for segment in (await task).segments] == [0]
        request = GenerateRequest(new_rid(), PROMPT, 400)
        running = await start(engine, request)
        await engine.pause("retract")
        with pytest.raises(EngineError, match="version 2 was not staged, version 1 was"):
            await engine.receive_weights("take", endpoint.group_name, 2, plan_hash, 5)
        assert await engine.checksums() == before and await engine.version() == 0
        await engine.receive_weights("take", endpoint.group_name, 1, plan_hash, 5)
        await engine.resume()
        generation = await running
        assert [segment.policy_version for segment in generation.segments][-1] == 1
        assert_attested(request, generation, references)


async def test_a_refused_publication_leaves_the_version(
    engine: SGLangEngine, trainer: tuple[Publisher, dict[str, torch.Tensor]]
) -> None:
    with pytest.raises(EngineError, match=rf"^engine {engine.name} refused .*not in weight group nobody"):
        await engine.receive_weights("connect", "nobody", 0, "", 5)
    publisher, _ = trainer
    endpoint = await connect(engine, publisher)
    await engine.pause("abort")
    with pytest.raises(EngineError, match="follows plan"):
        await engine.receive_weights("publish", endpoint.group_name, 1, "00" * 32, 5)
    assert await engine.version() == 0
    publisher.disconnect(engine.name)
    with pytest.raises(EngineError, match="does not exist"):  # it left the group at once
        await engine.leave_weight_group(endpoint.group_name)
    await engine.resume()
    assert (await engine.generate(greedy(2), TIMEOUT_S)).segments[0].policy_version == 0
