"""Second stage: one task per sample takes it from its prompt to a durable reward.

    Sampler: tokens --> reward --> journal --> the last sample of a group finishes the group
                          '--> failed: the whole group is dropped, admission lets another prompt in

Only whole groups are trained: the advantage of a sample is relative to all of its siblings.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from asyncrl.control.ledger import SampleState
from asyncrl.engines.base import EngineError
from asyncrl.rewards.base import Reward
from asyncrl.rollout.group import LiveGroup, LiveSample, Request
from asyncrl.rollout.records import GroupDropped, SampleRewarded
from asyncrl.rollout.rewarding import Decode, ErrorRate, Scored, score
from asyncrl.rollout.sampling import Sampler
from asyncrl.rollout.state import RolloutState
from asyncrl.types import FinishReason

ABORT_TIMEOUT_S = 10.0


class Processor:
    """Shared by all samples; not thread-safe."""

    def __init__(self, state: RolloutState, reward: Reward, decode: Decode) -> None:
        self._state = state
        self._reward = reward
        self._decode = decode
        self.sampler = Sampler(state)
        self.errors = ErrorRate(state.settings.max_reward_error_rate)

    async def run(self, group: LiveGroup, sample: LiveSample) -> None:
        """Return when the sample has its reward, or its group was dropped."""
        await self.sampler.finish(group, sample)
        if group.dropped:
            return
        trajectory = sample.trajectory
        if trajectory.finish_reason is FinishReason.ERROR or not trajectory.num_model_tokens:
            await self._drop(group, "engine_error")
            return
        scored = await self._score(group, sample)
        self.errors.add(scored.error)
        if group.dropped:
            return
        if scored.error is not None:
            await self._drop(group, "reward_error")
            return
        await self._rewarded(group, sample, scored)

    async def _score(self, group: LiveGroup, sample: LiveSample) -> Scored:
        token_ids = sample.trajectory.new_token_ids
        timeout_s = self._state.settings.reward_timeout_s
        return await score(self._reward, group.prompt, self._decode(token_ids), token_ids, timeout_s)

    async def _rewarded(self, group: LiveGroup, sample: LiveSample, scored: Scored) -> None:
        state = self._state
        reward = SampleRewarded(group.group_id, sample.sample_idx, scored.score, scored.parts)
        sample_id = state.settings.sample_ids(group.group_id)[sample.sample_idx]
        state.ledger.move([sample_id], SampleState.REWARDED)
        await state.commit.write(reward)
        if group.dropped:
            return
        sample.reward = reward
        if group.rewarded:
            state.sequencer.finish(group.group_id)
        state.progress.notify()

    async def _drop(self, group: LiveGroup, reason: str) -> None:
        """End a group and its siblings' requests; its place goes to a later prompt."""
        state = self._state
        group.dropped = True
        state.sequencer.drop(group.group_id)
        state.ledger.drop(state.settings.sample_ids(group.group_id), reason)
        del state.groups[group.group_id]
        state.progress.notify()
        await state.commit.write(GroupDropped(group.group_id, reason))
        await abort(sample.request for sample in group.samples if sample.request is not None)


async def abort(requests: Iterable[Request]) -> None:
    """Interrupt requests, all at once; an engine that cannot be told is found out by the request itself."""
    await asyncio.gather(*map(_abort_one, requests))


async def _abort_one(request: Request) -> None:
    with contextlib.suppress(EngineError, TimeoutError):
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await request.engine.abort(request.rid)
