"""A real engine that was paused in place goes on with new weights over the keys and values of the old ones.

It has no prefix cache, so it is an engine of its own, for `make chaos-runs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.engines.base import GenerateRequest, new_rid
from tests.engine.conftest import (
    Reference,
    RunningEngine,
    assert_logprobs_equal,
    one_more_engine,
    trainer_of_one_rank,
)
from tests.engine.test_generate import PROMPT, TIMEOUT_S, greedy, start
from tests.engine.test_weights import connected, publish

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def uncached(
    model_dirs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEngine]:
    directory = tmp_path_factory.mktemp("uncached")
    with one_more_engine(model_dirs[0], directory, tp_size=1, extra=("--disable-radix-cache",)) as engine:
        yield engine


@torch.no_grad()
def mixed_logprobs(
    references: tuple[Reference, Reference], before: tuple[int, ...], after: tuple[int, ...]
) -> list[float]:
    """Of ``after`` under version 1, where version 0 computed the keys and values of all but the last of
    ``before``."""
    old, new = (reference._model for reference in references)
    cache = old(torch.tensor([before[:-1]]), use_cache=True).past_key_values
    inputs = torch.tensor([before[-1:] + after[:-1]])
    logits = new(inputs, past_key_values=cache, use_cache=True).logits[0]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(after)[:, None])[:, 0].tolist()


async def test_a_request_goes_on_over_old_keys_and_values_and_a_new_one_does_not(
    uncached: RunningEngine, model_dirs: tuple[Path, Path], references: tuple[Reference, Reference]
) -> None:
    engine = uncached.client()
    with trainer_of_one_rank(model_dirs[1]) as (publisher, _):
        async with connected(engine, publisher) as endpoint:
            running = await start(engine, GenerateRequest(new_rid(), PROMPT, 400))
            await engine.pause("in_place")
            await publish(engine, publisher, endpoint, 1, publisher.plan_hash(engine.name))
            await engine.resume()
            generation = await running
            old, new = generation.segments
            assert (old.policy_version, new.policy_version) == (0, 1)
            before = PROMPT + old.token_ids
            assert_logprobs_equal(list(old.logprobs), references[0].logprobs(before)[len(PROMPT) - 1 :])
            assert_logprobs_equal(list(new.logprobs), mixed_logprobs(references, before, new.token_ids))
            fresh = await engine.generate(greedy(40), TIMEOUT_S)  # the same prompt, from version 1 alone
            expected = references[1].logprobs(PROMPT + fresh.token_ids)[len(PROMPT) - 1 :]
            assert_logprobs_equal(list(fresh.logprobs), expected)
    await engine.close()
