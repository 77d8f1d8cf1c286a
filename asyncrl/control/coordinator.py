"""The coordinator: policy version, registry of engines and rings, the publication protocol.

It holds no sample and no weight; what it knows is one immutable `RunState`, replaced under a condition so
that everybody can wait for a change. The publication of version v, driven by the trainer's leader:

    trainer leader            coordinator                         engine (every TP rank)
    prepare(v)        ->      pause serving engines       ->      interrupt running samples, hold new ones
    transfer(v)       ->      start receive_weights       ->      receive buckets, verify, all ranks agree
    [all trainer ranks send their buckets to the engines' ranks, no coordinator on the path]
    commit(v)         ->      await every receive         ->      verified: resume as version v
                                                                  not: stay paused, QUARANTINED

An engine serves v only after all of its ranks verified v. One that fails is quarantined and gets no
traffic; the version is committed when at least one engine holds it, and the run fails when none is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.control.messages import (
    CheckpointDone,
    EngineInfo,
    EngineStatus,
    EngineVerification,
    HeldOut,
    Phase,
    ProcessInfo,
    Publication,
    PublicationResult,
    RolloutReport,
    RunState,
    StepDone,
    TrainerStart,
    WeightGroup,
)
from asyncrl.engines import base
from asyncrl.engines.base import Engine, EngineError

EngineFactory = Callable[[EngineInfo], Engine]


class ProtocolError(RuntimeError):
    """A request that the state of the run does not allow; nothing was changed."""


class Coordinator:
    """Not thread-safe: one event loop owns it."""

    def __init__(
        self,
        *,
        make_engine: EngineFactory,
        interrupt: str,
        timeout_s: float,
        probe_prompts: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self._make_engine = make_engine
        self._interrupt = interrupt
        self._timeout_s = timeout_s
        self._probe_prompts = probe_prompts  # logprobs of these are part of every result, if any
        self._state = RunState()
        self._changed = asyncio.Condition()
        self._engines: dict[str, Engine] = {}
        self._paused_at: dict[str, float] = {}
        self._receiving: dict[str, asyncio.Task[None]] = {}
        self._publishing: Publication | None = None

    @property
    def state(self) -> RunState:
        return self._state

    async def wait_for_change(self, after: int, timeout_s: float) -> RunState:
        """The state as soon as its revision exceeds ``after``, or after ``timeout_s`` as it is."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: self._state.revision > after), timeout=timeout_s
                )
        return self._state

    async def _update(self, **changes: Any) -> None:
        async with self._changed:
            self._state = self._state.model_copy(update={**changes, "revision": self._state.revision + 1})
            self._changed.notify_all()

    async def _update_engine(self, name: str, **changes: Any) -> None:
        engines = tuple(
            engine.model_copy(update=changes) if engine.name == name else engine
            for engine in self._state.engines
        )
        await self._update(engines=engines)

    # --- what the parts of the run report ---

    async def register_engine(self, engine: EngineInfo) -> None:
        others = tuple(known for known in self._state.engines if known.name != engine.name)
        self._engines[engine.name] = self._make_engine(engine)
        await self._update(engines=tuple(sorted((*others, engine), key=lambda known: known.name)))

    async def register_process(self, process: ProcessInfo) -> None:
        others = tuple(known for known in self._state.processes if known.name != process.name)
        await self._update(processes=(*others, process))

    async def trainer_started(self, start: TrainerStart) -> None:
        await self._update(start_step=start.step, batches_trained=start.step, rings=start.rings)

    async def step_done(self, done: StepDone) -> None:
        if done.batch_idx != self._state.batches_trained:
            raise ProtocolError(
                f"batch {done.batch_idx} reported as trained, expected batch {self._state.batches_trained}"
            )
        await self._update(batches_trained=done.batch_idx + 1)

    async def checkpoint_done(self, done: CheckpointDone) -> None:
        await self._update(checkpoint_step=done.step, oldest_checkpoint_step=done.oldest_step)

    async def rollout_report(self, report: RolloutReport) -> None:
        await self._update(rollout=report)

    async def held_out(self, result: HeldOut) -> None:
        await self._update(held_out=(*self._state.held_out, result))

    async def set_phase(self, phase: Phase) -> None:
        await self._update(phase=phase)

    async def request_stop(self) -> None:
        await self._update(stop_requested=True)

    async def fail(self, reason: str) -> None:
        """Record the first failure that ends the run; later ones are its consequences."""
        if not self._state.failure:
            await self._update(failure=reason)

    # --- weight groups ---

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Start the engine's side of joining; the trainer's ranks join meanwhile, then `finish_joining`."""
        engine = self._engine(group.engine)
        self._start(group.engine, self._join(engine, group))

    async def _join(self, engine: Engine, group: WeightGroup) -> None:
        await engine.join_weight_group(
            base.WeightGroup(
                name=group.group_name,
                master_address=group.master_address,
                master_port=group.master_port,
                rank_offset=group.rank_offset,
                world_size=group.world_size,
                backend="nccl" if group.backend == "nccl" else "gloo",
            ),
            self._timeout_s,
        )
        await engine.receive_weights("connect", group.group_name, 0, "", self._timeout_s)

    async def finish_joining(self, name: str) -> None:
        """Wait until the engine has joined and knows its receive plan.

        Raises:
            EngineError: it could not.
        """
        await self._finish(name)
        await self._update_engine(name, status=EngineStatus.PAUSED)

    # --- publication ---

    async def prepare(self, publication: Publication) -> tuple[str, ...]:
        """Pause the engines that take part; returns their names."""
        if self._publishing is not None:
            raise ProtocolError(
                f"version {publication.version} cannot be published while"
                f" version {self._publishing.version} is in flight"
            )
        if publication.version <= self._state.policy_version:
            raise ProtocolError(
                f"version {publication.version} was already published (now {self._state.policy_version})"
            )
        self._publishing = publication
        if self._interrupt == "drain":
            await self._drain()
        names = tuple(
            engine.name
            for engine in self._state.engines
            if engine.status in (EngineStatus.SERVING, EngineStatus.PAUSED)
        )
        await asyncio.gather(*(self._pause(name) for name in names))
        return names

    async def _pause(self, name: str) -> None:
        if name in self._paused_at:
            return
        self._paused_at[name] = time.monotonic()
        await self._engine(name).pause("abort" if self._interrupt == "abort" else "retract")
        await self._update_engine(name, status=EngineStatus.PAUSED)

    async def _drain(self) -> None:
        """Wait until the rollouter has no sample running."""
        await self._update(draining=True)
        deadline = time.monotonic() + self._timeout_s
        while self._state.rollout.running > 0:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"drain: {self._state.rollout.running} samples still run after {self._timeout_s:.0f} s;"
                    " raise weights.timeout_s or set rollout.interrupt to abort"
                )
            await self.wait_for_change(self._state.revision, 1.0)

    async def transfer(self, group_names: dict[str, str]) -> None:
        """Let the paused engines receive; the trainer's ranks send from now on."""
        publication = self._require_publication()
        for name, group_name in group_names.items():
            self._start(
                name,
                self._engine(name).receive_weights(
                    "publish",
                    group_name,
                    publication.version,
                    publication.plan_hashes[name],
                    self._timeout_s,
                ),
            )

    async def commit(self) -> PublicationResult:
        """Wait for every receive; resume the engines that verified, quarantine the others."""
        publication = self._require_publication()
        committed: list[str] = []
        failed: dict[str, str] = {}
        paused_s: dict[str, float] = {}
        verification: dict[str, EngineVerification] = {}
        for name in sorted(self._receiving):
            try:
                await self._finish(name)
                if self._probe_prompts:
                    verification[name] = await self._verify(name)
            except EngineError as error:
                failed[name] = str(error)
                await self._update_engine(name, status=EngineStatus.QUARANTINED, reason=str(error))
                continue
            committed.append(name)
        for name in committed:
            await self._engine(name).resume()
            paused_s[name] = time.monotonic() - self._paused_at.pop(name, time.monotonic())
            await self._update_engine(name, status=EngineStatus.SERVING, policy_version=publication.version)
        self._publishing = None
        if not committed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
            raise EngineError(f"version {publication.version} reached no engine: {reasons or 'none is left'}")
        await self._update(
            policy_version=publication.version,
            publications=self._state.publications + 1,
            draining=False,
        )
        return PublicationResult(
            version=publication.version,
            committed=tuple(committed),
            failed=failed,
            paused_s=paused_s,
            verification=verification,
        )

    async def _verify(self, name: str) -> EngineVerification:
        """Checksums while paused, then logprobs, for which the engine must answer."""
        engine = self._engine(name)
        checksums = await engine.checksums()
        await engine.resume()
        logprobs = [await engine.logprobs(prompt) for prompt in self._probe_prompts]
        return EngineVerification(checksums=tuple(checksums), logprobs=tuple(tuple(row) for row in logprobs))

    def _require_publication(self) -> Publication:
        if self._publishing is None:
            raise ProtocolError("no publication was prepared")
        return self._publishing

    def _engine(self, name: str) -> Engine:
        if name not in self._engines:
            raise ProtocolError(f"no engine named {name}; there are {sorted(self._engines)}")
        return self._engines[name]

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        if name in self._receiving:
            work.close()
            raise ProtocolError(f"{name} is already receiving")
        self._receiving[name] = asyncio.ensure_future(work)

    async def _finish(self, name: str) -> None:
        if name not in self._receiving:
            raise ProtocolError(f"{name} is not receiving anything")
        await self._receiving.pop(name)

    async def close(self) -> None:
        for task in self._receiving.values():
            task.cancel()
        for engine in self._engines.values():
            await engine.close()
