"""The Ray actors of a run. Each is a thin shell: Ray places it, the part inside does not know Ray.

    CoordinatorActor  control port, one per run, named
    EngineActor       owns one SGLang server's process tree
    RolloutActor      the rollouter

Arguments and results are short JSON strings; a failure inside an actor reaches the run through the
coordinator (`failure`), and the death of the actor's process through the launcher's watcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from pathlib import Path

import ray

from asyncrl.config import Config
from asyncrl.control.client import AsyncControlClient, ControlAddress, ControlError
from asyncrl.control.coordinator import Coordinator
from asyncrl.control.messages import EngineInfo, ProcessInfo
from asyncrl.control.server import build_app, serve
from asyncrl.engines.base import Engine, EngineError
from asyncrl.engines.ports import free_port
from asyncrl.engines.process import engine_command, wait_until_ready
from asyncrl.engines.sglang import SGLangEngine
from asyncrl.launch.child import Child
from asyncrl.launch.engines import engine_name
from asyncrl.launch.gpu import has_gpu
from asyncrl.launch.warden import descendants
from asyncrl.rollout.service import RolloutService
from asyncrl.weights.geometry import ModelGeometry
from asyncrl.weights.probe import probe_prompts

COORDINATOR_NAME = "coordinator"


def log_to(path: Path) -> None:
    """Send this process's output to a file of the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def make_engine(info: EngineInfo) -> Engine:
    return SGLangEngine(info.name, info.url, info.api_key)


@ray.remote(num_cpus=0)
class CoordinatorActor:
    """Serves the control port for as long as it lives."""

    def __init__(self, config_json: str, token: str, log: str) -> None:
        log_to(Path(log))
        self._config = Config.model_validate_json(config_json)
        self._token = token
        self._log = log

    async def start(self) -> str:
        """Bind the control port; returns its URL."""
        config = self._config
        probes: tuple[tuple[int, ...], ...] = ()
        if config.weights.verify:
            probes = probe_prompts(ModelGeometry.from_hf(config.model.path).vocab_size)
        self._coordinator = Coordinator(
            make_engine=make_engine,
            interrupt=config.rollout.interrupt,
            timeout_s=config.weights.timeout_s,
            probe_prompts=probes,
        )
        app = build_app(self._coordinator, self._token)
        self._runner, url = await serve(app, config.control.host, config.control.port)
        await self._coordinator.register_process(
            ProcessInfo(name="coordinator", pid=os.getpid(), log=self._log)
        )
        return url


@ray.remote(num_cpus=0)
class EngineActor:
    """Starts one engine and registers it when it answers."""

    def __init__(
        self, config_json: str, engine_idx: int, incarnation: int, url: str, token: str, log: str
    ) -> None:
        log_to(Path(log).with_suffix(".owner.log"))
        self._config = Config.model_validate_json(config_json)
        self._engine_idx = engine_idx
        self._incarnation = incarnation
        self._control = AsyncControlClient(ControlAddress(url, token))
        self._log = Path(log)

    async def start(self) -> None:
        """Bring the engine up; a failure is the run's, that of a restart ends this actor alone."""
        name = engine_name(self._engine_idx)
        await self._register(name, "owner", os.getpid())
        try:
            await self._start(name)
        except EngineError as error:
            if not self._incarnation:
                await self._control.post("failure", str(error))
                return
            print(error, flush=True)
            os._exit(1)

    async def _register(self, name: str, label: str, pid: int) -> None:
        info = ProcessInfo(
            name=f"{name} {label}",
            pid=pid,
            log=str(self._log),
            engine=name if self._config.engine.replicas > 1 else "",
            incarnation=self._incarnation,
        )
        await self._control.post("processes", info)

    async def _start(self, name: str) -> None:
        config = self._config
        port = config.engine.port + self._engine_idx if config.engine.port else free_port()
        token = secrets.token_hex(16)
        info = EngineInfo(
            name=name,
            url=f"http://127.0.0.1:{port}",
            api_key=token,
            tp=config.engine.tp,
            incarnation=self._incarnation,
        )
        command = engine_command(
            config.engine,
            model_path=config.model.path.absolute(),
            dtype=config.engine_dtype,
            port=port,
            token=token,
            device="cuda" if has_gpu() else "cpu",
            join_timeout_s=config.weights.timeout_s,
        )
        self._child = Child(
            name, command.arguments, log=self._log, environment=command.environment, grace_s=1.0
        )
        engine = make_engine(info)
        await wait_until_ready(
            engine,
            exit_status=self._child.exit_code,
            log=self._log,
            timeout_s=config.engine.start_timeout_s,
        )
        await engine.close()
        for pid, label in _labelled(descendants(self._child.pid)):
            await self._register(name, label, pid)
        await self._control.post("engines", info)


def _labelled(pids: list[int]) -> list[tuple[int, str]]:
    """The processes of an engine whose end ends it, each with a name of its own."""
    labelled: list[tuple[int, str]] = []
    for pid in sorted(pids):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        if "resource_tracker" in command or not command.strip():
            continue  # a helper whose end means nothing
        title = command.split()[0]
        if title.startswith("sglang::"):
            labelled.append((pid, title.removeprefix("sglang::")))
        else:  # the server comes first; processes that could not set their title are numbered
            labelled.append((pid, f"process {len(labelled)}" if labelled else "server"))
    return labelled


@ray.remote(num_cpus=0)
class RolloutActor:
    """Runs the rollouter."""

    def __init__(self, config_json: str, url: str, token: str, log: str) -> None:
        log_to(Path(log))
        self._config = Config.model_validate_json(config_json)
        self._control = AsyncControlClient(ControlAddress(url, token))
        self._log = log

    async def run(self) -> None:
        """Until the run is finished; a failure is reported to the coordinator."""
        await self._control.post("processes", ProcessInfo(name="rollouter", pid=os.getpid(), log=self._log))
        task = asyncio.ensure_future(RolloutService(self._config, self._control, make_engine).run())
        await asyncio.wait([task])
        error = task.exception()
        if error is not None:
            with contextlib.suppress(ControlError):  # the coordinator is gone, which the launcher sees
                await self._control.post("failure", f"rollouter: {type(error).__name__}: {error}")
            await self._control.close()
        task.result()
