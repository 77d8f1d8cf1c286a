"""A real engine takes the version of another one that samples on, and meets the trainer while it serves.

Two more engines are started for this, so it is for `make chaos-runs`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from asyncrl.engines.base import INTERRUPTED, EngineError, GenerateRequest, Generation, new_rid
from asyncrl.engines.sglang import SGLangEngine
from tests.engine.conftest import (
    TIMEOUT_S_WEIGHTS,
    Reference,
    RunningEngine,
    assert_logprobs_equal,
    one_more_engine,
    trainer_of_one_rank,
)
from tests.engine.test_generate import PROMPT, TIMEOUT_S
from tests.engine.test_weights import connect, publish

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["tp1", "tp2"])
def pair(
    request: pytest.FixtureRequest,
    running_engines: dict[str, RunningEngine],
    model_dirs: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RunningEngine, RunningEngine]]:
    """An engine that serves, and another of as many ranks that was just started."""
    source = running_engines[request.param]
    directory = tmp_path_factory.mktemp("peer")
    with one_more_engine(model_dirs[0], directory, tp_size=source.tp_size) as target:
        yield source, target


@pytest.fixture
async def clients(
    pair: tuple[RunningEngine, RunningEngine], model_dirs: tuple[Path, Path]
) -> AsyncIterator[tuple[SGLangEngine, SGLangEngine]]:
    """The source serves version 1, the target version 0; afterwards both do the latter."""
    source, target = (running.client() for running in pair)
    await load(source, model_dirs[1], 1)
    yield source, target
    for engine in (source, target):
        await load(engine, model_dirs[0], 0)
        await engine.close()


async def load(engine: SGLangEngine, model: Path, version: int) -> None:
    await engine.pause("abort")
    await engine.update_from_disk(str(model), version, TIMEOUT_S_WEIGHTS)
    await engine.resume()


async def refill(source: SGLangEngine, target: SGLangEngine) -> None:
    group = f"refill-{new_rid()}"
    await target.pause("abort")
    address = await source.give_weights(group, 1, TIMEOUT_S_WEIGHTS)
    await target.take_weights(group, address, 1, TIMEOUT_S_WEIGHTS)
    await target.resume()


@dataclass
class Sampling:
    """Requests to an engine, one after the other, until they are enough."""

    engine: SGLangEngine
    answers: list[tuple[tuple[int, ...], Generation]] = field(default_factory=list)

    async def __aenter__(self) -> Sampling:
        self._enough = False
        self._task = asyncio.create_task(self._sample())
        while not self.answers:
            await asyncio.sleep(0.02)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._enough = True
        await self._task

    async def _sample(self) -> None:
        while not self._enough:
            prefix = (*PROMPT, len(self.answers))
            request = GenerateRequest(new_rid(), prefix, 100)
            self.answers.append((prefix, await self.engine.generate(request, TIMEOUT_S)))

    def check(self, version: int, reference: Reference) -> None:
        """They ran to their end, every token under one version and from its weights."""
        assert len(self.answers) > 1
        for prefix, generation in self.answers:
            assert generation.finish != INTERRUPTED and generation.token_ids
            assert {segment.policy_version for segment in generation.segments} == {version}
            expected = reference.logprobs(prefix + generation.token_ids)
            assert_logprobs_equal(list(generation.logprobs), expected[len(prefix) - 1 :])


async def test_an_engine_takes_the_version_of_one_that_samples_on(
    clients: tuple[SGLangEngine, SGLangEngine], references: tuple[Reference, Reference]
) -> None:
    source, target = clients
    before, wanted = await target.checksums(), await source.checksums()
    assert before != wanted and await target.version() == 0
    await target.logprobs(PROMPT * 4)  # keys and values of the old weights are in its cache
    async with Sampling(source) as sampling:
        await refill(source, target)
    sampling.check(1, references[1])
    assert await target.checksums() == wanted
    assert await target.version() == 1 and await target.ready()
    assert_logprobs_equal(await target.logprobs(PROMPT * 4), references[1].logprobs(PROMPT * 4))
    assert await source.checksums() == wanted


async def test_an_engine_that_was_refilled_meets_the_trainer_while_it_samples(
    clients: tuple[SGLangEngine, SGLangEngine],
    references: tuple[Reference, Reference],
    model_dirs: tuple[Path, Path],
) -> None:
    source, target = clients
    await refill(source, target)
    with trainer_of_one_rank(model_dirs[0]) as (publisher, _):
        async with Sampling(target) as sampling:
            endpoint = await connect(target, publisher)
        sampling.check(1, references[1])
        await target.pause("retract")
        await publish(target, publisher, endpoint, 2, publisher.plan_hash(target.name))
        await target.resume()
        assert await target.version() == 2
        assert_logprobs_equal(await target.logprobs(PROMPT * 4), references[0].logprobs(PROMPT * 4))
        publisher.disconnect(target.name)
        await target.leave_weight_group(endpoint.group_name)


async def test_refusals_leave_both_as_they_were(clients: tuple[SGLangEngine, SGLangEngine]) -> None:
    source, target = clients
    before = await target.checksums()
    with pytest.raises(EngineError, match=r"attests version 1 and cannot give version 2"):
        await source.give_weights("nobody", 2, 5)
    await target.pause("abort")
    with pytest.raises(EngineError, match=r"refused .*taking version 1 from 127.0.0.1:9, .*source is gone"):
        await target.take_weights("nobody", "127.0.0.1:9", 1, 5)
    address = await source.give_weights("another", 1, 2)  # nobody comes
    with pytest.raises(EngineError, match=r"taking version 2 from .*it gives version 1|another rank"):
        await target.take_weights("another", address, 2, 5)
    assert await target.version() == 0 and await target.checksums() == before
    await target.resume()
    await refill(source, target)
    assert await target.checksums() == await source.checksums()
