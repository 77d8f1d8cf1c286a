"""The scripted engine behaves towards its caller as a real one does."""

from __future__ import annotations

import asyncio
import math

import pytest

from asyncrl.engines.base import INTERRUPTED, Engine, EngineError, GenerateRequest, WeightGroup, new_rid
from asyncrl.engines.scripted import ScriptedEngine, scripted_logprob, scripted_token
from asyncrl.types import FinishReason

PROMPT = (5, 6, 7)


def request(max_new_tokens: int = 8, prefix: tuple[int, ...] = PROMPT, **options: object) -> GenerateRequest:
    return GenerateRequest(new_rid(), prefix, max_new_tokens, **options)  # type: ignore[arg-type]


def expected_tokens(count: int, version: int = 0, seed: int | None = None) -> tuple[int, ...]:
    prefix = list(PROMPT)
    for _ in range(count):
        prefix.append(scripted_token(prefix, version, seed))
    return tuple(prefix[len(PROMPT) :])


async def publish(engine: ScriptedEngine, version: int) -> None:
    group = WeightGroup("weights", "127.0.0.1", 1, rank_offset=1, world_size=2)
    await engine.join_weight_group(group, 1.0)
    await engine.receive_weights("publish", "weights", version, "hash", 1.0)


def test_is_an_engine() -> None:
    engine: Engine = ScriptedEngine()
    assert engine.name == "scripted"


def test_tokens_are_a_function_of_prefix_seed_and_version() -> None:
    async def run() -> None:
        generation = await ScriptedEngine().generate(request(), 5.0)
        assert generation.token_ids == expected_tokens(8)
        assert generation.finish is FinishReason.LENGTH
        assert generation.logprobs == tuple(scripted_logprob(token, 0) for token in expected_tokens(8))
        seeded = await ScriptedEngine().generate(request(seed=3), 5.0)
        assert seeded.token_ids == expected_tokens(8, seed=3) != generation.token_ids

    asyncio.run(run())


def test_stop_token_ends_and_is_kept() -> None:
    async def run() -> None:
        tokens = expected_tokens(8)
        generation = await ScriptedEngine().generate(request(stop_token_ids=(tokens[3],)), 5.0)
        assert generation.token_ids == tokens[:4]
        assert generation.finish is FinishReason.STOP

    asyncio.run(run())


def test_any_schedule_of_aborts_yields_the_uncut_tokens() -> None:
    async def run() -> None:
        engine = ScriptedEngine(token_interval_s=0.0)
        tokens: tuple[int, ...] = ()
        while len(tokens) < 30:
            task = asyncio.create_task(engine.generate(request(30 - len(tokens), PROMPT + tokens), 5.0))
            for _ in range(6):
                await asyncio.sleep(0)
            await engine.pause("abort")
            generation = await task
            assert generation.finish in (INTERRUPTED, FinishReason.LENGTH)
            tokens += generation.token_ids
            await engine.resume()
        assert tokens == expected_tokens(30)

    asyncio.run(run())


def test_abort_before_the_first_token_has_no_segments() -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        await engine.pause("retract")
        wanted = request()
        task = asyncio.create_task(engine.generate(wanted, 5.0))
        await asyncio.sleep(0)
        await engine.abort(wanted.rid)
        generation = await task
        assert generation.segments == ()
        assert generation.finish == INTERRUPTED

    asyncio.run(run())


def test_retract_splits_segments_at_the_new_version() -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        task = asyncio.create_task(engine.generate(request(20), 5.0))
        for _ in range(8):
            await asyncio.sleep(0)
        await engine.pause("retract")
        await publish(engine, 1)
        assert (await engine.load()).num_queued == 1
        await engine.resume()
        generation = await task
        assert [segment.policy_version for segment in generation.segments] == [0, 1]
        for segment in generation.segments:
            for token, logprob in zip(segment.token_ids, segment.logprobs, strict=True):
                assert math.isclose(logprob, scripted_logprob(token, segment.policy_version))
        assert await engine.version() == 1

    asyncio.run(run())


def test_failures_are_engine_errors_that_name_the_engine() -> None:
    async def run() -> None:
        engine = ScriptedEngine("e3")
        engine.fail_next("receive_weights", "could not verify")
        await engine.pause("abort")
        with pytest.raises(EngineError, match="engine e3 could not verify"):
            await engine.receive_weights("publish", "weights", 1, "hash", 1.0)
        assert await engine.version() == 0
        with pytest.raises(EngineError, match="not in weight group"):
            await engine.receive_weights("publish", "weights", 1, "hash", 1.0)
        task = asyncio.create_task(engine.generate(request(), 5.0))
        await asyncio.sleep(0)
        engine.kill("out of memory")
        with pytest.raises(EngineError, match="engine e3 does not answer"):
            await task
        assert not await engine.ready()

    asyncio.run(run())


def test_a_death_hands_back_what_was_sampled() -> None:
    async def run() -> None:
        engine = ScriptedEngine("e3", token_interval_s=0.01)
        task = asyncio.create_task(engine.generate(request(max_new_tokens=500), 5.0))
        await asyncio.sleep(0.1)
        engine.kill()
        generation = await task
        assert generation.finish == INTERRUPTED and 0 < len(generation.token_ids) < 500

    asyncio.run(run())


def test_generate_keeps_its_deadline_while_paused() -> None:
    async def run() -> None:
        engine = ScriptedEngine("e4")
        await engine.pause("retract")
        with pytest.raises(EngineError, match=r"engine e4 request \w+ took longer than 0.05 s"):
            await engine.generate(request(), 0.05)

    asyncio.run(run())


def test_publishing_needs_a_pause() -> None:
    async def run() -> None:
        with pytest.raises(EngineError, match="must be paused"):
            await publish(ScriptedEngine(), 1)

    asyncio.run(run())


def test_a_paused_engine_takes_what_another_one_offers() -> None:
    async def run() -> None:
        source, target = ScriptedEngine("e5"), ScriptedEngine("e6")
        await source.update_from_disk("", 3, 1.0)
        target.peers = {"e5": source}.get
        with pytest.raises(EngineError, match="engine e5 attests version 3, not 2"):
            await source.give_weights("group", 2, 1.0)
        address = await source.give_weights("group", 3, 1.0)
        assert await source.ready()
        with pytest.raises(EngineError, match="engine e6 must be paused"):
            await target.take_weights("group", address, 3, 1.0)
        await target.pause("abort")
        with pytest.raises(EngineError, match="engine e6 finds nobody at e5 who offers version 3"):
            await target.take_weights("another", address, 3, 1.0)
        assert await target.version() == 0
        await target.take_weights("group", address, 3, 1.0)
        assert await target.version() == 3

    asyncio.run(run())
