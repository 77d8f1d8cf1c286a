"""One run on one machine: start every part, watch them, end them all.

    launcher (this process: supervision, display)
      |- warden > ray head > CoordinatorActor, RolloutActor, EngineActor > warden > SGLang server
      |- warden > torchrun > trainer ranks

Every part is below a warden whose pipe this process holds, so nothing survives it, whatever kills it. The
run ends in one of three ways: finished (the rollouter said so after the last evaluation), stopped (a
signal: the trainer saves, a resumable directory stays), failed (the first death or the first reported
failure is shown; exit code 1). The death of one of several engines ends nothing: see `EngineFleet`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import ray

from asyncrl.config import Config
from asyncrl.control.client import ControlAddress, ControlClient, ControlError
from asyncrl.control.messages import Phase, RunState
from asyncrl.engines.ports import free_port
from asyncrl.launch.actors import COORDINATOR_NAME, CoordinatorActor, EngineActor, RolloutActor
from asyncrl.launch.child import Child
from asyncrl.launch.engines import EngineFleet, engine_log
from asyncrl.launch.ray_head import RayError, RayHead, start_ray
from asyncrl.launch.warden import descendants
from asyncrl.launch.watch import Watched, Watcher

RAY_START_TIMEOUT_S = 120.0
ACTOR_START_TIMEOUT_S = 120.0
STOP_GRACE_S = 5.0  # for the trainer to save after a signal
POLL_S = 0.5
RAY_DAEMONS = ("gcs_server", "raylet")

OnState = Callable[[RunState], None]
OnPhase = Callable[[str], None]
OnEngine = Callable[[str], None]  # told in one line what became of an engine


class RunFailed(RuntimeError):
    """The run cannot go on; the message says which part ended it and why."""


class RunStopped(RuntimeError):
    """A signal asked the run to stop; what could be saved is saved."""


class LocalRun:
    """Starts and supervises one run. Use once: `run`, then `close` (always)."""

    def __init__(
        self,
        config: Config,
        log_dir: Path,
        ring_dir: Path,
        on_phase: OnPhase,
        on_state: OnState,
        on_engine: OnEngine,
    ) -> None:
        self._config = config
        self._log_dir = log_dir
        self._ring_dir = ring_dir  # below /dev/shm; removed when the run ends, however it ends
        self._on_phase = on_phase
        self._on_state = on_state
        self._on_engine = on_engine
        self._watcher = Watcher()
        self._ray: RayHead | None = None
        self._trainer: Child | None = None
        self._control: ControlClient | None = None
        self._fleet: EngineFleet | None = None
        self._watched: set[int] = set()
        self._interrupts = 0
        self._starting = False
        self._actors: list[object] = []
        self.last_state = RunState()

    def run(self) -> RunState:
        """From nothing to the end of training.

        Raises:
            RunFailed: a part died or reported a failure.
            RunStopped: SIGINT, SIGTERM or SIGUSR1 arrived.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._interrupt)
        signal.signal(signal.SIGALRM, self._leave_start)
        try:
            self._starting = True
            try:
                self._start()
            finally:
                self._starting = False
        except KeyboardInterrupt as error:
            raise RunStopped("stopped by a signal before training began") from error
        except (RayError, ray.exceptions.RayError) as error:
            if self._interrupts:  # Ray reports the interruption as a failure of its own
                raise RunStopped("stopped by a signal before training began") from error
            self._fail_with_death(f"start-up: {error}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        return self._supervise()

    def _interrupt(self, *_: object) -> None:
        self._interrupts += 1
        if self._starting:
            # Again until it is heard: what is raised inside Ray's callbacks and retries may be lost there.
            signal.setitimer(signal.ITIMER_REAL, 0.01, 0.5)

    def _leave_start(self, *_: object) -> None:
        """Nothing is there to save yet: do not wait for whatever is being waited for."""
        if self._starting:
            raise KeyboardInterrupt

    def _start(self) -> None:
        config = self._config
        self._on_phase("starting Ray")
        cpus = len(os.sched_getaffinity(0))
        head = start_ray(self._log_dir / "ray.log", cpus, RAY_START_TIMEOUT_S, self._remember_ray)
        self._watch_ray(head)
        self._check()
        self._on_phase("starting the coordinator")
        token = secrets.token_hex(16)
        config_json = config.model_dump_json()
        coordinator = CoordinatorActor.options(name=COORDINATOR_NAME).remote(  # type: ignore[attr-defined]
            config_json, token, str(self._log_dir / "coordinator.log")
        )
        self._actors.append(coordinator)
        url = ray.get(coordinator.start.remote(), timeout=ACTOR_START_TIMEOUT_S)
        address = ControlAddress(url, token)
        self._control = ControlClient(address)
        self._check()
        self._on_phase("starting engines and trainer")
        self._trainer = self._start_trainer(address)

        def start_engine(engine_idx: int, incarnation: int) -> object:
            log = str(engine_log(self._log_dir, engine_idx))
            engine = EngineActor.remote(config_json, engine_idx, incarnation, url, token, log)  # type: ignore[attr-defined]
            self._actors.append(engine.start.remote())
            return engine

        self._fleet = EngineFleet(config, start_engine, self._on_engine)
        log = str(self._log_dir / "rollouter.log")
        rollouter = RolloutActor.remote(config_json, url, token, log)  # type: ignore[attr-defined]
        self._actors += [rollouter, rollouter.run.remote()]

    def _remember_ray(self, head: RayHead) -> None:
        self._ray = head

    def _start_trainer(self, address: ControlAddress) -> Child:
        world_size = self._config.parallel.world_size
        # engines and trainer are rarely busy at the same moment: the ranks may use every core
        threads = max(1, len(os.sched_getaffinity(0)) // world_size)
        environment = {
            **address.environment(),
            "ASYNCRL_LOG_DIR": str(self._log_dir),
            "ASYNCRL_RING_DIR": str(self._ring_dir),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron: compute and communication kernels in launch order
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
        }
        return Child(
            "trainer",
            [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world_size}"]
            + ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "--max-restarts=0"]
            + ["-m", "asyncrl.train", str(self._config.run_dir / "config.toml")],
            log=self._log_dir / "torchrun.log",
            environment=environment,
            grace_s=1.0,
            remove=[self._ring_dir],
        )

    def _supervise(self) -> RunState:
        control = self._require_control()
        revision = -1
        while True:
            if self._trainer is not None:
                self._watch_command(self._trainer, "torchrun")
            self._check()
            try:
                state = control.state(after=revision, wait_s=POLL_S)
            except ControlError as error:
                self._fail_with_death(str(error))
            revision = state.revision
            self.last_state = state
            for process in state.processes:
                log = Path(process.log) if process.log else None
                self._watch(Watched(process.name, process.pid, log, process.engine, process.incarnation))
            self._on_state(state)
            self._follow_engines(state)
            if state.failure:
                self._fail_with_death(state.failure)
            if state.phase is Phase.FINISHED:
                self._watcher.expect_ends()
                return state

    def _follow_engines(self, state: RunState) -> None:
        if self._fleet is None or state.phase is Phase.FINISHED:
            return
        try:
            cause = self._fleet.follow(self._require_control(), self._watcher.take_engine_deaths(), state)
        except ControlError as error:
            self._fail_with_death(str(error))
        if cause is not None:
            raise RunFailed(cause.describe())

    def _cause_of_end(self) -> str | None:
        """The first death that the run cannot do without, in words."""
        engines = None
        if self._fleet is not None:
            engines = self._fleet.cause(self._watcher.take_engine_deaths(), self.last_state)
        cause = engines or self._watcher.first_death
        return cause.describe() if cause is not None else None

    def _check(self) -> None:
        """Raise when a part died or a signal came."""
        if self._watcher.first_death is not None:
            raise RunFailed(self._cause_of_end())
        if self._interrupts:
            self._save_and_stop()

    def _fail_with_death(self, reason: str) -> NoReturn:
        """A reported failure is often the consequence of a death that is about to be noticed."""
        deadline = time.monotonic() + 1.0
        while (cause := self._cause_of_end()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        raise RunFailed(cause or reason)

    def _save_and_stop(self) -> None:
        """Let the trainer save at its next step; do not wait longer than the grace."""
        self._watcher.expect_ends()
        if self.last_state.phase is Phase.STARTING:
            raise RunStopped("stopped by a signal before training began")
        self._on_phase("stopping: the trainer saves")
        deadline = time.monotonic() + STOP_GRACE_S
        if self._control is not None and self._trainer is not None:
            with contextlib.suppress(ControlError):  # a coordinator that is gone has nothing to stop
                self._control.post("stop", timeout_s=2.0)
                while self._interrupts < 2 and not self._trainer.wait(0.05) and time.monotonic() < deadline:
                    continue
                self.last_state = self._control.state()
        raise RunStopped("stopped by a signal")

    def _watch(self, process: Watched) -> None:
        if process.pid not in self._watched:
            self._watched.add(process.pid)
            self._watcher.add(process)

    def _watch_ray(self, head: RayHead) -> None:
        self._watch_command(head.child, "ray head")
        for pid in descendants(head.child.pid):
            executable = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            name = executable.rpartition("/")[2]
            if name in RAY_DAEMONS:
                self._watch(Watched(f"ray {name}", pid, head.child.log))

    def _watch_command(self, child: Child, name: str) -> None:
        """The command of a warden, and the warden, which dies after it."""
        if child.pid not in self._watched and (below := descendants(child.pid)):
            self._watch(Watched(name, below[0], child.log))
            self._watch(Watched(f"warden of {name}", child.pid, child.log))

    def _require_control(self) -> ControlClient:
        if self._control is None:
            raise RunFailed("the coordinator was not started")
        return self._control

    def close(self) -> None:
        """End every process of the run and remove its shared memory. Safe to call at any point."""
        self._watcher.expect_ends()
        children = [child for child in (self._trainer, self._ray.child if self._ray else None) if child]
        for child in children:
            child.begin_end()
        if ray.is_initialized():
            ray.shutdown()
        for child in children:
            child.end(timeout_s=20.0)  # on a starved machine; otherwise two seconds
        self._watcher.close()
        shutil.rmtree(self._ring_dir, ignore_errors=True)
