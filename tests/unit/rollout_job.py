"""A rollouter with scripted engines and a list for a ring, driven step by step by a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from asyncrl.engines.scripted import ScriptedEngine
from asyncrl.rewards.base import RewardResult
from asyncrl.rollout.admission import Placement
from asyncrl.rollout.journal import Journal
from asyncrl.rollout.report import ReleasedBatch
from asyncrl.rollout.rollouter import Rollouter
from asyncrl.rollout.settings import RolloutSettings
from asyncrl.rollout.sinks import SampleSink
from asyncrl.types import Prompt, SampleGroup

SETTINGS = RolloutSettings(
    groups_per_batch=2,
    samples_per_group=2,
    num_rings=1,
    max_staleness=1,
    max_new_tokens=8,
    temperature=1.0,
    stop_token_ids=tuple(range(100)),
    request_timeout_s=20.0,
    progress_timeout_s=20.0,
    reward_timeout_s=20.0,
    max_reward_error_rate=1.0,
    num_batches=3,
)
DEADLINE_S = 60.0

Score = Callable[[Prompt], RewardResult]


@dataclass
class Prompts:
    asked: list[int] = field(default_factory=list)

    def prompt_at(self, prompt_idx: int) -> Prompt:
        self.asked.append(prompt_idx)
        return Prompt(prompt_idx, (), (500 + prompt_idx, 7))


class FunctionReward:
    def __init__(self, score: Score) -> None:
        self._score = score

    async def score(self, prompt: Prompt, completion: str, token_ids: tuple[int, ...]) -> RewardResult:
        return self._score(prompt)

    async def close(self) -> None:
        """Nothing to end."""


@dataclass
class ListSink:
    groups: list[tuple[SampleGroup, Placement]] = field(default_factory=list)
    closed: str | None = None
    forward: SampleSink | None = None

    async def put_group(self, group: SampleGroup, placement: Placement) -> None:
        if self.closed:
            raise RuntimeError(self.closed)
        if self.forward is not None:
            await self.forward.put_group(group, placement)
        self.groups.append((group, placement))


class Job:
    """One life of a rollouter; `train_all` plays the trainer."""

    def __init__(
        self,
        directory: Path,
        *,
        score: Score = lambda prompt: RewardResult(1.0),
        engines: Sequence[ScriptedEngine] = (),
        start_batch: int = 0,
        **changes: object,
    ) -> None:
        self.settings = replace(SETTINGS, **changes)
        self.engines = list(engines) or [ScriptedEngine("e0"), ScriptedEngine("e1")]
        self.journal = Journal.open(directory / "journal.sqlite", self.settings.journal)
        self.sink = ListSink()
        self.prompts = Prompts()
        self.batches: list[ReleasedBatch] = []
        self.rollouter = Rollouter(
            engines={engine.name: engine for engine in self.engines},
            prompts=self.prompts,
            reward=FunctionReward(score),
            decode=lambda token_ids: " ".join(map(str, token_ids)),
            sink=self.sink,
            journal=self.journal,
            settings=self.settings,
            start_batch=start_batch,
            on_batch_released=self.batches.append,
        )
        self.start_batch = self.version = start_batch
        self.running = asyncio.ensure_future(self.rollouter.run())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the rollouter work until ``condition``; its failure is the test's."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                if self.running.done():
                    self.running.result()
                await asyncio.sleep(0.001)

    async def train_batch(self) -> None:
        """Take the next batch and publish the version after it, interrupting what runs."""
        wanted = (self.version - self.start_batch + 1) * self.settings.groups_per_batch
        await self.until(lambda: len(self.sink.groups) >= wanted)
        self.version += 1
        for engine in self.engines:
            await engine.pause("abort")
            await engine.update_from_disk("", self.version, 1.0)
            await engine.resume()
        self.rollouter.on_version(self.version, self.version)

    async def train_all(self) -> None:
        while self.version < (self.settings.num_batches or 0):
            await self.train_batch()

    async def stop(self) -> None:
        self.rollouter.stop()
        async with asyncio.timeout(DEADLINE_S):
            await self.running
        self.journal.close()

    async def crash(self) -> None:
        self.running.cancel()
        await asyncio.wait({self.running})
        self.journal.close()

    async def failure(self) -> str:
        """The message with which `run` ends."""
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait({self.running})
        self.journal.close()
        error = self.running.exception()
        assert error is not None, "the rollouter ended without an error"
        return f"{type(error).__name__}: {error}"
