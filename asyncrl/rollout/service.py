"""The rollouter as a part of a run: it follows the coordinator's state and reports to it.

    coordinator state --poll--> engines, policy version, batches trained, checkpoints, draining, phase
    Rollouter --report, once a second--> counters;  --per batch--> rollouts/step_N.jsonl
    held-out evaluation before the first step and after the last

The service waits for the first publication, so that no token is ever sampled from weights that are not the
trainer's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.config import Config
from asyncrl.control.client import AsyncControlClient
from asyncrl.control.messages import (
    EngineInfo,
    EngineStatus,
    HeldOut,
    Phase,
    RolloutReport,
    RunState,
)
from asyncrl.data.chat import ChatTemplate
from asyncrl.data.prompts import PromptSource, open_prompts
from asyncrl.engines.base import Engine, EngineError
from asyncrl.observe.jsonl import json_line
from asyncrl.rewards.base import Reward
from asyncrl.rewards.load import open_reward
from asyncrl.ring.ring import Ring
from asyncrl.rollout.evaluate import evaluate
from asyncrl.rollout.journal import Journal
from asyncrl.rollout.report import ReleasedBatch
from asyncrl.rollout.rollouter import Rollouter
from asyncrl.rollout.settings import RolloutSettings
from asyncrl.rollout.sinks import RingSink

REPORT_INTERVAL_S = 1.0
POLL_S = 10.0
RETIRE_TIMEOUT_S = 5.0
OUT_OF_SERVICE = (EngineStatus.QUARANTINED, EngineStatus.LOST)

EngineFactory = Callable[[EngineInfo], Engine]


class RolloutService:
    """One per rollout host. Use `run` once."""

    def __init__(self, config: Config, control: AsyncControlClient, make_engine: EngineFactory) -> None:
        self._config = config
        self._control = control
        self._make_engine = make_engine
        self._template = ChatTemplate(config.model.path)
        self._engines: dict[str, Engine] = {}
        self._incarnations: dict[str, int] = {}  # of those engines
        self._retired: list[Engine] = []  # requests may still be running there
        self._version = -1  # of the state that was followed last
        self._state = RunState()
        self._publication_seen = asyncio.Event()

    async def run(self) -> None:
        """Until the run has finished."""
        config = self._config
        prompts = open_prompts(config.data, config.eval, self._template, config.rollout.max_prompt_tokens)
        reward = await open_reward(config.reward)
        try:
            await self._wait_for_first_publication()
            if self._state.start_step == 0:
                await self._evaluate("before", prompts, reward)
            await self._roll(prompts, reward)
            if not self._state.stop_requested:
                await self._evaluate("after", prompts, reward)
            await self._control.post("phase", Phase.FINISHED)
        finally:
            await reward.close()
            for engine in (*self._engines.values(), *self._retired):
                await engine.close()
            await self._control.close()

    async def _poll(self) -> RunState:
        self._state = await self._control.state(after=self._state.revision, wait_s=POLL_S)
        return self._state

    async def _wait_for_first_publication(self) -> None:
        deadline = time.monotonic() + self._config.engine.start_timeout_s + self._config.weights.timeout_s
        while self._state.policy_version < 0 or not self._state.rings:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    "waited for the trainer's first publication; see the logs of trainer and engines"
                )
            await self._poll()
        await self._follow_engines(None)

    # --- held-out evaluation ---

    async def _evaluate(self, label: str, prompts: PromptSource, reward: Reward) -> None:
        if not prompts.heldout:
            return
        result = await evaluate(
            engines=self._engines,
            prompts=prompts.heldout,
            reward=reward,
            decode=self._template.decode,
            max_new_tokens=self._config.rollout.max_new_tokens,
            stop_token_ids=self._template.stop_token_ids,
            max_concurrent=self._config.engine.max_running_requests * len(self._engines),
            timeout_s=self._config.rollout.request_timeout_s,
        )
        await self._control.post(
            "held_out",
            HeldOut(
                label=label,
                policy_version=self._state.policy_version,
                accuracy=result.accuracy,
                num_tasks=result.num_tasks,
                seconds=result.seconds,
            ),
        )

    # --- rollouts ---

    async def _roll(self, prompts: PromptSource, reward: Reward) -> None:
        """Feed the trainer until it has done its last step."""
        settings = RolloutSettings.from_config(self._config, self._template.stop_token_ids)
        journal = Journal.open(self._config.run_dir / "rollouts" / "journal.sqlite", settings.journal)
        rings = [
            Ring.open(Path(path), role="producer", name=f"rollouter-{idx}")
            for idx, path in enumerate(self._state.rings)
        ]
        rollouter = Rollouter(
            engines=self._engines,
            prompts=prompts,
            reward=reward,
            decode=self._template.decode,
            sink=RingSink(rings, journal.producer_uid, self._config.train.batch_timeout_s),
            journal=journal,
            settings=settings,
            start_batch=self._state.start_step,
            on_batch_released=self._write_batch,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(rollouter.run())
                reporting = tasks.create_task(self._report_forever(rollouter))
                await self._follow(rollouter, running)
                rollouter.stop()
                await running
                reporting.cancel()
            await self._report(rollouter)
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        finally:
            for ring in rings:
                ring.detach()
            journal.close()

    async def _follow(self, rollouter: Rollouter, running: asyncio.Task[None]) -> None:
        """Tell the rollouter what changes, until training is over."""
        draining = False
        while self._state.phase is not Phase.FINISHING and not self._state.stop_requested:
            if running.done():
                return
            state = await self._poll()
            await self._follow_engines(rollouter)
            rollouter.on_version(state.policy_version, state.batches_trained)
            if state.checkpoint_step > 0:
                await rollouter.on_checkpoint(state.checkpoint_step, state.oldest_checkpoint_step)
            if state.draining != draining:
                draining = state.draining
                rollouter.set_paused(draining)
                if draining:
                    await rollouter.drained(self._config.weights.timeout_s)
                    await self._report(rollouter)
        if self._state.checkpoint_step > 0:
            await rollouter.on_checkpoint(self._state.checkpoint_step, self._state.oldest_checkpoint_step)

    async def _follow_engines(self, rollouter: Rollouter | None) -> None:
        """Use the engines that serve; what runs on one that does not goes on elsewhere.

        An engine that the rollouter gave up, though it serves, gets another chance with every version.
        """
        is_new, self._version = self._version != self._state.policy_version, self._state.policy_version
        for info in self._state.engines:
            other = self._incarnations.get(info.name) != info.incarnation
            if info.name in self._engines and (other or info.status in OUT_OF_SERVICE):
                await self._retire(info, rollouter)
            if info.status is not EngineStatus.SERVING:
                continue
            is_unknown = info.name not in self._engines
            if is_unknown:
                self._engines[info.name] = self._make_engine(info)
                self._incarnations[info.name] = info.incarnation
            if rollouter is not None and (is_unknown or (is_new and not rollouter.uses_engine(info.name))):
                rollouter.add_engine(info.name, self._engines[info.name])

    async def _retire(self, info: EngineInfo, rollouter: Rollouter | None) -> None:
        engine = self._engines.pop(info.name)
        self._retired.append(engine)
        if rollouter is not None:
            rollouter.remove_engine(info.name, info.reason or f"{info.name} was started again")
        with contextlib.suppress(EngineError, TimeoutError):  # a dead one has ended its requests itself
            async with asyncio.timeout(RETIRE_TIMEOUT_S):
                await engine.abort_all()

    async def _report_forever(self, rollouter: Rollouter) -> None:
        while True:
            await self._report(rollouter)
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def _report(self, rollouter: Rollouter) -> None:
        stats = rollouter.stats()
        await self._control.post(
            "rollout",
            RolloutReport(
                counts=rollouter.counts(),
                tokens_generated=stats.tokens_generated,
                engine_busy_s=stats.engine_busy_s,
                num_engines=stats.num_engines,
                reward_errors=stats.reward_errors,
                next_prompt_idx=stats.next_prompt_idx,
                released_batches=stats.released_batches,
            ),
        )

    def _write_batch(self, batch: ReleasedBatch) -> None:
        """rollouts/step_N.jsonl; N is the step that trains this batch, from 1 on."""
        if not self._config.observe.rollouts:
            return
        path = self._config.run_dir / "rollouts" / f"step_{batch.batch_idx + 1}.jsonl"
        path.write_text("".join(json_line(record.to_json()) for record in batch.records))


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
