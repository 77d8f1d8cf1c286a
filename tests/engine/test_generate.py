"""A real engine generates, scores, is interrupted and goes on as an independent model says."""

from __future__ import annotations

import asyncio
import time

import pytest

from asyncrl.engines.base import INTERRUPTED, EngineError, GenerateRequest, Generation, new_rid
from asyncrl.engines.sglang import SGLangEngine
from asyncrl.types import FinishReason
from tests.engine.conftest import Reference, RunningEngine, assert_logprobs_equal

PROMPT = (72, 101, 108, 108, 111)
TIMEOUT_S = 120.0


def greedy(max_new_tokens: int, prefix: tuple[int, ...] = PROMPT) -> GenerateRequest:
    return GenerateRequest(new_rid(), prefix, max_new_tokens, temperature=0.0)


async def start(engine: SGLangEngine, request: GenerateRequest) -> asyncio.Task[Generation]:
    """Start a request and return once the engine runs it."""
    task = asyncio.create_task(engine.generate(request, TIMEOUT_S))
    deadline = time.monotonic() + TIMEOUT_S
    while (await engine.load()).num_running == 0 and not task.done():
        assert time.monotonic() < deadline, f"request {request.rid} never ran"
        await asyncio.sleep(0.05)
    return task


async def test_sampled_logprobs_equal_the_reference(
    engine: SGLangEngine, references: tuple[Reference, Reference]
) -> None:
    for temperature in (0.0, 1.0):
        request = GenerateRequest(new_rid(), PROMPT, 24, temperature=temperature)
        generation = await engine.generate(request, TIMEOUT_S)
        assert [segment.policy_version for segment in generation.segments] == [0]
        expected = references[0].logprobs(PROMPT + generation.token_ids)[len(PROMPT) - 1 :]
        assert_logprobs_equal(list(generation.logprobs), expected)


async def test_prompt_logprobs_equal_the_reference(
    engine: SGLangEngine, references: tuple[Reference, Reference]
) -> None:
    tokens = tuple(range(1, 60))
    await engine.generate(greedy(2, tokens), TIMEOUT_S)  # so that the prefix is cached
    assert_logprobs_equal(await engine.logprobs(tokens), references[0].logprobs(tokens))


async def test_abort_and_resume_from_the_prefix_equal_no_cut(engine: SGLangEngine) -> None:
    uncut = await engine.generate(greedy(500), TIMEOUT_S)
    tokens: tuple[int, ...] = ()
    num_cuts = 0
    while len(tokens) < len(uncut.token_ids):
        request = greedy(500 - len(tokens), PROMPT + tokens)
        task = await start(engine, request)
        if num_cuts < 3:
            await asyncio.sleep(0.1)
            await engine.abort(request.rid)
        generation = await task
        num_cuts += generation.finish == INTERRUPTED
        tokens += generation.token_ids
        if generation.finish != INTERRUPTED:
            break
    assert num_cuts >= 1
    assert tokens == uncut.token_ids
    assert generation.finish == uncut.finish


async def test_stop_token_ends_and_is_kept(engine: SGLangEngine) -> None:
    tokens = (await engine.generate(greedy(8), TIMEOUT_S)).token_ids
    request = GenerateRequest(new_rid(), PROMPT, 8, temperature=0.0, stop_token_ids=(tokens[3],))
    generation = await engine.generate(request, TIMEOUT_S)
    assert generation.token_ids == tokens[: tokens.index(tokens[3]) + 1]
    assert generation.finish is FinishReason.STOP


async def test_pause_abort_is_quick_and_keeps_tokens(engine: SGLangEngine) -> None:
    tasks = [await start(engine, greedy(1500)) for _ in range(3)]
    await asyncio.sleep(0.5)
    started = time.monotonic()
    await engine.pause("abort")
    generations = await asyncio.gather(*tasks)
    assert time.monotonic() - started < 1.5
    assert all(generation.finish == INTERRUPTED for generation in generations)
    assert all(generation.token_ids for generation in generations)
    assert not await engine.ready()


async def test_abort_during_a_pause_ends_a_held_request_without_tokens(engine: SGLangEngine) -> None:
    await engine.pause("abort")
    request = greedy(4)
    task = asyncio.create_task(engine.generate(request, TIMEOUT_S))
    await asyncio.sleep(0.2)
    await engine.abort(request.rid)
    assert await task == Generation(segments=(), finish=INTERRUPTED)
    await engine.resume()
    assert (await engine.generate(greedy(4), TIMEOUT_S)).finish is FinishReason.LENGTH


async def test_abort_of_one_leaves_the_other(engine: SGLangEngine) -> None:
    first, second = greedy(1500), greedy(20)
    tasks = [await start(engine, first), await start(engine, second)]
    await engine.abort(first.rid)
    aborted, finished = await asyncio.gather(*tasks)
    assert aborted.finish == INTERRUPTED
    assert finished.finish is FinishReason.LENGTH
    assert len(finished.token_ids) == 20


async def test_abort_of_an_unknown_request_changes_nothing(engine: SGLangEngine) -> None:
    await engine.abort(new_rid())
    assert (await engine.generate(greedy(2), TIMEOUT_S)).finish is FinishReason.LENGTH


async def test_seed_decides_the_tokens_whatever_the_batch(
    running_engines: dict[str, RunningEngine],
) -> None:
    engine = running_engines["tp1"].client()

    def seeded(seed: int) -> GenerateRequest:
        return GenerateRequest(new_rid(), PROMPT, 16, seed=seed)

    alone = await engine.generate(seeded(7), TIMEOUT_S)
    together = await asyncio.gather(*(engine.generate(seeded(seed), TIMEOUT_S) for seed in (5, 6, 7)))
    assert together[2].token_ids == alone.token_ids
    assert len({generation.token_ids for generation in together}) == 3
    resumed = GenerateRequest(new_rid(), PROMPT + alone.token_ids[:5], 11, seed=7)
    assert (await engine.generate(resumed, TIMEOUT_S)).token_ids == alone.token_ids[5:]
    await engine.close()
    unseeded = running_engines["tp2"].client()
    with pytest.raises(EngineError, match=r"^engine tp2 ignores seeds; add --enable-deterministic"):
        await unseeded.generate(seeded(7), TIMEOUT_S)
    await unseeded.close()


async def test_a_group_prefills_its_prompt_once(engine: SGLangEngine) -> None:
    prompt = tuple(range(200, 240))
    tasks = [engine.generate(greedy(2, prompt), TIMEOUT_S) for _ in range(4)]
    generations = await asyncio.gather(*tasks)
    assert sum(generation.num_cached_tokens for generation in generations) >= 3 * (len(prompt) - 1)
    assert len({generation.token_ids for generation in generations}) == 1


async def test_refusals_are_one_line_that_names_the_engine(
    engine: SGLangEngine, running_engines: dict[str, RunningEngine]
) -> None:
    with pytest.raises(EngineError, match=rf"^engine {engine.name} refused request \w+: .*longer than"):
        await engine.generate(greedy(1, tuple([5] * 3000)), TIMEOUT_S)
    with pytest.raises(EngineError, match=r"took longer than 0.2 s$"):
        await engine.generate(greedy(1500), 0.2)
    stranger = SGLangEngine("stranger", running_engines[engine.name].url, "wrong token")
    with pytest.raises(EngineError, match=r"^engine stranger refused /model_info: Unauthorized$"):
        await stranger.version()
    await stranger.close()


def test_the_token_is_in_no_log(running_engines: dict[str, RunningEngine]) -> None:
    for running in running_engines.values():
        assert running.token not in running.log.read_text(errors="replace")
