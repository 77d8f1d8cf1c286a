"""Takes one trajectory to its end over any number of requests, engines and interruptions.

    gate open? -> router: which replica -> Engine.generate -> step -> journal -> finished?
        ^                                                                  | no
        '---------------- prefix, what is left of the budget --------------'

An interruption, an engine that fails and a replica that is added all look the same from here: the
trajectory is ready again and its prefix goes to whichever replica the router names.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from asyncrl.control.ledger import SampleState
from asyncrl.engines.base import INTERRUPTED, Engine, EngineError, GenerateRequest, new_rid
from asyncrl.rollout.group import LiveGroup, LiveSample, Request
from asyncrl.rollout.records import SampleAdvanced
from asyncrl.rollout.state import RolloutState
from asyncrl.rollout.trajectory import Generate, Generated, Lost, Save, Submit, step
from asyncrl.rollout.waiting import RolloutError
from asyncrl.types import PolicyVersion

PROBE_TIMEOUT_S = 10.0
MAX_LOST_REQUESTS = 8
"""Lost requests of one sample after which its prompt, not the engines, is to blame."""


@dataclass(slots=True)
class SamplingCounters:
    """Running totals of this life of the process."""

    tokens_generated: int = 0
    num_requests: int = 0
    num_interrupted: int = 0
    num_lost: int = 0  # requests that failed with their engine


class Sampler:
    """Shared by all samples of a rollouter; not thread-safe."""

    def __init__(self, state: RolloutState) -> None:
        self._state = state
        self.counters = SamplingCounters()

    async def finish(self, group: LiveGroup, sample: LiveSample) -> None:
        """Return once the trajectory is finished and durable, or the group was dropped.

        Raises:
            RolloutError: no engine is left, the sample fails wherever it goes, or an engine serves weights
                older than it promised.
        """
        while not sample.trajectory.finished and not group.dropped:
            await self._state.gate.passed(group.start_version)
            if not group.dropped:
                await self._request(group, sample)

    async def _request(self, group: LiveGroup, sample: LiveSample) -> None:
        sample.trajectory, (action,) = step(sample.trajectory, Submit())
        if not isinstance(action, Generate):
            raise RolloutError(f"group {group.group_id}: multi-turn environments are not connected")
        sample_id = self._state.settings.sample_ids(group.group_id)[sample.sample_idx]
        self._state.ledger.move([sample_id], SampleState.RUNNING)
        event = await self._generate(group, sample, self._make_request(sample_id, action))
        if group.dropped:
            return
        sample.trajectory, actions = step(sample.trajectory, event)
        if not sample.trajectory.finished:
            self._state.ledger.move([sample_id], SampleState.INTERRUPTED)
        for save in actions:
            if isinstance(save, Save):
                await self._state.commit.write(SampleAdvanced(group.group_id, sample.sample_idx, save.event))
        self._state.progress.notify()

    def _make_request(self, sample_id: int, action: Generate) -> GenerateRequest:
        seed = self._state.settings.sampling_seed
        return GenerateRequest(
            rid=new_rid(),
            token_ids=action.token_ids,
            max_new_tokens=action.max_new_tokens,
            temperature=self._state.settings.temperature,
            stop_token_ids=self._state.settings.stop_token_ids,
            # the same in every request of a sample, so that cuts do not change what is sampled
            seed=None if seed is None else (seed * 1_000_003 + sample_id) % 2**31,
        )

    async def _generate(
        self, group: LiveGroup, sample: LiveSample, request: GenerateRequest
    ) -> Generated | Lost:
        name, engine = self._state.router.acquire(group.engine_name)
        group.engine_name = name
        sample.request = Request(request.rid, name, engine)
        sample.num_requests += 1
        self.counters.num_requests += 1
        try:
            generation = await engine.generate(request, self._state.settings.request_timeout_s)
        except EngineError as error:
            await self._lost(group, sample, name, engine, error)
            return Lost()
        finally:
            sample.request = None
            self._state.router.release(name, engine)
        self._state.router.succeeded(name, engine)
        for segment in generation.segments:
            self._check_version(group, name, segment.policy_version)
        self.counters.tokens_generated += len(generation.token_ids)
        self.counters.num_interrupted += generation.finish == INTERRUPTED
        return Generated(generation.segments, generation.finish)

    def _check_version(self, group: LiveGroup, name: str, version: PolicyVersion) -> None:
        if version < group.start_version:
            raise RolloutError(
                f"{name} attests policy version {version} to group {group.group_id}, which began at version"
                f" {group.start_version}; publish the current version to an engine before it joins"
            )

    async def _lost(
        self, group: LiveGroup, sample: LiveSample, name: str, engine: Engine, error: EngineError
    ) -> None:
        """Decide whether the engine is gone or only the request; bound the failures of both."""
        self.counters.num_lost += 1
        sample.num_lost += 1
        if sample.num_lost > MAX_LOST_REQUESTS:
            raise RolloutError(
                f"sample {sample.sample_idx} of prompt {group.prompt.prompt_idx} failed on an engine"
                f" {sample.num_lost} times, the last time: {error}"
            ) from error
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await engine.version()
        except (EngineError, TimeoutError):
            self._state.router.remove(name, str(error))
        else:
            self._state.router.failed(name, engine, str(error))
