"""A whole job around the real rollouter: trainer, rings, engines, publications, checkpoints, and faults.

Everything but the rollouter is a model a few lines long. What happens is written to a `History`, which is
checked by rules that share no code with the rollouter (`tests.sim.rules`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from typing import Any

from asyncrl.engines.scripted import ScriptedEngine
from asyncrl.rollout.records import JournalError
from asyncrl.rollout.rollouter import Rollouter
from asyncrl.rollout.settings import RolloutSettings
from tests.sim.loop import SimLoop
from tests.sim.parts import (
    RECORD_KINDS,
    STOP_TOKENS,
    VOCAB,
    FlakyReward,
    History,
    MemoryJournal,
    Prompts,
    RingFailure,
    Rings,
)

VIRTUAL_LIMIT_S = 2000.0


def random_settings(rng: random.Random) -> RolloutSettings:
    """Small enough that every run meets its limits."""
    num_rings = rng.choice([1, 1, 2])
    return RolloutSettings(
        groups_per_batch=num_rings * rng.randint(1, 3),
        samples_per_group=rng.randint(1, 3),
        num_rings=num_rings,
        max_staleness=rng.choice([0, 1, 1, 2, 3]),
        max_new_tokens=rng.randint(1, 14),
        temperature=0.0,
        stop_token_ids=STOP_TOKENS,
        request_timeout_s=200.0,
        progress_timeout_s=300.0,
        reward_timeout_s=10.0,
        max_reward_error_rate=1.0,
        num_batches=rng.randint(3, 6),
    )


class World:
    """One simulated job."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        loop.max_executor_delay_s = loop.rng.choice([0.0, 0.02, 1.0])
        self.settings = random_settings(loop.rng)
        self.history = History(self.settings)
        self.journal = MemoryJournal(self.history)
        self.mode = loop.rng.choice(["abort", "retract", "drain"])
        self.reward = FlakyReward(loop, loop.rng.choice([0.0, 0.05, 0.2]))
        self.faults_left = loop.rng.choice([0, 3, 8])
        self.restarts_left = 2
        self.over = False
        self.checkpoints = [0]  # those kept, oldest first
        self.begin_life(0)

    async def run(self) -> History:
        """Train all batches, over as many lives as the faults demand."""
        while not await self.live():
            await self.crash()
            self.begin_life(self.loop.rng.choice(self.checkpoints))
            self.history.faults.append(f"restart from batch {self.trained}")
        num_batches = self.trained
        await self.while_alive(self.rollouter.on_checkpoint(num_batches, num_batches))
        self.rollouter.stop()
        await self.running
        self.history.counts = self.rollouter.counts()
        return self.history

    async def live(self) -> bool:
        """One life of the job; returns whether it ended because training did."""
        trainer = self.loop.create_task(self.train())
        breaker = self.loop.create_task(self.break_things())
        await asyncio.wait({trainer, breaker}, return_when=asyncio.FIRST_COMPLETED)
        if breaker.done() and breaker.result() == "restart":
            trainer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await trainer
            return False
        await trainer
        self.over = True
        await breaker
        return True

    # --- processes ---

    def begin_life(self, start_batch: int) -> None:
        """All processes start anew from the checkpoint of ``start_batch``; the rings are empty."""
        self.trained = self.history.version = self.life_start = start_batch
        self.checkpoints = [k for k in self.checkpoints if k <= start_batch]
        self.draining = False
        self.lock = asyncio.Lock()  # a publication and an engine that joins exclude each other
        self.rings = Rings(self.loop, self.history)
        self.engines = {f"e{i}": self.make_engine(f"e{i}") for i in range(self.loop.rng.randint(1, 3))}
        self.begin_rollouter()

    def make_engine(self, name: str) -> ScriptedEngine:
        interval = self.loop.rng.choice([0.0, 0.01, 0.1])
        engine = ScriptedEngine(name, token_interval_s=interval, vocab_size=VOCAB, versioned_tokens=False)
        engine._version = self.history.version
        return engine

    def begin_rollouter(self) -> None:
        self.rollouter = Rollouter(
            engines=self.engines,
            prompts=Prompts(),
            reward=self.reward,
            decode=str,
            sink=self.rings,
            journal=self.journal,
            settings=self.settings,
            start_batch=self.checkpoints[-1],
        )
        self.running = self.loop.create_task(self.rollouter.run())
        self.tell_version()

    def tell_version(self) -> None:
        """Consumption may be told before the version that follows from it."""
        self.rollouter.on_version(self.history.version, self.trained)
        self.rollouter.counts().check()

    async def while_alive(self, work: Coroutine[Any, Any, None]) -> None:
        """A call into the rollouter; it comes back even when the rollouter dies meanwhile."""
        task = self.loop.create_task(work)
        try:
            await asyncio.wait({task, self.running}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            task.cancel()

    # --- the trainer ---

    async def train(self) -> None:
        rng = self.loop.rng
        while self.trained < (self.settings.num_batches or 0):
            await self.batch_in_rings(self.trained)
            self.history.trained.append((self.trained, self.history.version))
            await asyncio.sleep(rng.random() * rng.choice([0.1, 3.0]))
            self.trained += 1
            if rng.random() < 0.5:
                self.tell_version()
            await self.publish(self.trained)
            self.tell_version()
            if rng.random() < 0.4:
                self.checkpoints = [*self.checkpoints[-1:], self.trained]
                await self.while_alive(self.rollouter.on_checkpoint(self.trained, self.checkpoints[0]))

    async def batch_in_rings(self, batch_idx: int) -> None:
        share = self.settings.groups_per_batch * self.settings.samples_per_group // self.settings.num_rings
        while min(self.rings.num_samples) < (batch_idx + 1 - self.life_start) * share:
            await asyncio.sleep(0.05)
            expected = self.running.cancelled() or self.journal.fault or self.rings.fault
            if self.running.done() and not expected:
                self.running.result()
            if self.loop.time() > VIRTUAL_LIMIT_S:
                raise AssertionError(f"batch {batch_idx} never came; {self.rollouter.counts()}")

    async def publish(self, version: int) -> None:
        async with self.lock:
            if self.mode == "drain":
                self.draining = True
                self.rollouter.set_paused(True)
                for engine in self.engines.values() if self.loop.rng.random() < 0.5 else ():
                    await engine.abort_all()  # hurries the drain; what was cut waits for the new version
                await self.while_alive(self.rollouter.drained(500.0))
                await asyncio.sleep(self.loop.rng.random() * 2.0)
                await self.expect_idle()
                self.draining = False
            engines = list(self.engines.values())
            for engine in engines:
                await engine.pause("retract" if self.mode == "retract" else "abort")
                await asyncio.sleep(self.loop.rng.random() * 0.02)
            if self.mode == "drain":
                await self.expect_idle()
            for engine in engines:
                engine._version = version
                await engine.resume()
                await asyncio.sleep(self.loop.rng.random() * 0.02)
            self.history.version = version
            self.rollouter.set_paused(False)

    async def expect_idle(self) -> None:
        """A drained engine has no request, neither running nor held."""
        for engine in self.engines.values():
            load = await engine.load()
            if load.num_running + load.num_queued and not self.running.done():
                self.history.leaks.append(f"{engine.name} has {load} while drained")

    # --- faults ---

    async def break_things(self) -> str:
        """One fault after the other; returns "restart" when the whole job has to start anew."""
        rng = self.loop.rng
        while not self.over and self.faults_left:
            self.faults_left -= 1
            await asyncio.sleep(rng.random() * 4.0)
            faults = [
                self.lose_engine,
                self.lose_request,
                self.crash_rollouter,
                self.stop_rollouter,
                self.fail_disk,
                self.fail_ring,
            ]
            if self.restarts_left and rng.random() < 0.2:
                self.restarts_left -= 1
                return "restart"
            fault = rng.choice(faults)
            self.history.faults.append(fault.__name__)
            await fault()
        return "over"

    async def lose_engine(self) -> None:
        """An engine dies; its successor joins with the current version."""
        if len(self.engines) < 2:
            return
        name = self.loop.rng.choice(sorted(self.engines))
        while self.lock.locked() and not self.draining:
            await asyncio.sleep(0.01)  # one that dies in a transfer is the coordinator's matter
        self.engines.pop(name).kill()
        await asyncio.sleep(self.loop.rng.random() * 2.0)
        async with self.lock:
            self.engines[name] = self.make_engine(name)
            self.rollouter.add_engine(name, self.engines[name])

    async def lose_request(self) -> None:
        name = self.loop.rng.choice(sorted(self.engines))
        self.engines[name].fail_next("generate", "lost one request")

    async def crash_rollouter(self) -> None:
        await self.crash()
        async with self.lock:
            self.begin_rollouter()

    async def fail_disk(self) -> None:
        """The next write ends the rollouter, with that error and no other; its successor goes on."""
        self.journal.fault = self.loop.rng.choice(["refuse", "lose"])
        self.journal.fault_kind = self.loop.rng.choice(RECORD_KINDS)
        await self.expect_end_by(JournalError)

    async def fail_ring(self) -> None:
        """The same for the next put into a ring."""
        self.rings.fault = True
        await self.expect_end_by(RingFailure)

    async def expect_end_by(self, kind: type[Exception]) -> None:
        await asyncio.wait({self.running}, timeout=5.0)  # there may be nothing to write or to put
        if self.running.done():
            error = self.running.exception()
            if not isinstance(error, kind):
                raise AssertionError(f"{kind.__name__} was injected, but the rollouter ended with {error!r}")
        await self.crash_rollouter()

    async def stop_rollouter(self) -> None:
        self.rollouter.stop()
        await self.running
        async with self.lock:
            self.begin_rollouter()

    async def crash(self) -> None:
        self.running.cancel()
        await asyncio.wait({self.running})
        self.journal.fault, self.rings.fault = "", False
