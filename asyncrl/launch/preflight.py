"""Everything that can be found wrong before a process is started: each problem one line with its fix.

    Config -> preflight -> problems (empty: go)

What needs no machine is checked when the configuration is read (`asyncrl.config`); here are the
checks that read the model directory, prompts, reward, ports, shared memory and the run directory.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
from pathlib import Path

from asyncrl.config import Config, RewardConfig
from asyncrl.data.reasoning_gym import ReasoningGymTasks
from asyncrl.data.rows import DataError, read_rows
from asyncrl.launch.estimate import GIB, engine_memory, memory_estimate
from asyncrl.launch.gpu import has_gpu
from asyncrl.launch.model_fit import longest_sample, model_fit_problems
from asyncrl.rewards.base import RewardError
from asyncrl.rewards.load import open_reward
from asyncrl.weights.geometry import ModelError, ModelGeometry

MIB = 1 << 20
RECORD_BYTES_PER_TOKEN = 13
"""token id 4, mask 1, behaviour logprob 4, policy version 4."""
RECORD_FIXED_BYTES = 512
"""Room for a record's header, group rewards and alignment."""


def preflight(config: Config) -> list[str]:
    """All problems of a configuration on this machine, in the order in which to fix them.

    Takes a few seconds: prompts are read and the reward is imported. Runs an event loop of its own.
    """
    return [
        *_model_problems(config),
        *_prompt_problems(config),
        *_reward_problems(config),
        *_port_problems(config),
        *_ring_problems(config),
        *_run_problems(config),
    ]


def _model_problems(config: Config) -> list[str]:
    directory = config.model.path
    if not directory.is_dir():
        return [f"model.path = {directory}: no such directory; name a folder downloaded from Hugging Face"]
    try:
        geometry = ModelGeometry.from_hf(directory)
    except ModelError as error:
        return [f"model.path: {error}"]
    files = [*_weight_problems(directory), *_tokenizer_problems(directory, geometry)]
    on_cpu = not has_gpu()
    fit = model_fit_problems(config, geometry, on_cpu=on_cpu)
    memory = _memory_problems(config, geometry) if on_cpu and not fit else []
    return [*files, *fit, *memory]


def _weight_problems(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in named if not (directory / name).is_file()]
        if missing:
            return [
                f"{directory}: {missing[0]} is missing ({len(missing)} of {len(named)}); download it again"
            ]
        return []
    if any(directory.glob("*.safetensors")):
        return []
    if any(directory.glob("*.bin")):
        return [f"{directory}: only pickled .bin weights, which are not loaded; convert them to safetensors"]
    return [f"{directory}: no *.safetensors; download the weights"]


def _tokenizer_problems(directory: Path, geometry: ModelGeometry) -> list[str]:
    path = directory / "tokenizer.json"
    if not path.is_file():
        return [f"{directory}: no tokenizer.json; download the tokenizer of the model"]
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else range(len(vocabulary))
    largest = max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", []))])
    if largest >= geometry.vocab_size:
        return [
            f"{directory}: tokenizer.json has token id {largest}, the model's vocab_size is"
            f" {geometry.vocab_size}; they belong to different models"
        ]
    return []


def _memory_problems(config: Config, geometry: ModelGeometry) -> list[str]:
    per_stage = config.parallel.world_size // config.parallel.pp
    trainer = sum(rank.total for rank in memory_estimate(config, geometry)) * per_stage
    engines = engine_memory(config, geometry).total * config.engine.replicas * config.engine.tp
    total = _machine_memory()
    if trainer + engines <= total:
        return []
    return [
        f"the run needs about {(trainer + engines) / GIB:.1f} GiB ({config.parallel.world_size} trainer ranks"
        f" {trainer / GIB:.1f}, engines {engines / GIB:.1f}), this machine has {total / GIB:.1f} GiB; lower"
        " train.microbatch_tokens or parallel.dp, or train a smaller model"
    ]


def _machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or less inside a container."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return physical if text == "max" else min(physical, int(text))


def _prompt_problems(config: Config) -> list[str]:
    data = config.data
    problems = []
    if data.reasoning_gym is not None:
        try:
            ReasoningGymTasks(data.reasoning_gym, data.task_args, data.seed).task_at(0)
        except DataError as error:
            problems.append(str(error))
    for setting, path in (("data.path", data.path), ("eval.path", config.eval.path)):
        if path is None:
            continue
        try:
            read_rows(path, data.prompt_key, data.answer_key)
        except DataError as error:
            problems.append(f"{setting}: {error}")
    return problems


def _reward_problems(config: Config) -> list[str]:
    try:
        asyncio.run(_open_and_close(config.reward))
    except RewardError as error:
        return [str(error)]
    return []


async def _open_and_close(config: RewardConfig) -> None:
    reward = await open_reward(config)
    await reward.close()


def _port_problems(config: Config) -> list[str]:
    wanted = [("control.port", config.control.host, config.control.port)] if config.control.port else []
    if config.engine.port:
        wanted += [
            ("engine.port", "127.0.0.1", config.engine.port + idx) for idx in range(config.engine.replicas)
        ]
    return [
        f"{setting}: port {port} is in use on {host}; choose another, or 0 for any free one"
        for setting, host, port in wanted
        if not _is_free(host, port)
    ]


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT can be bound
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _ring_problems(config: Config) -> list[str]:
    ring = config.ring
    if not ring.directory.is_dir():
        return [f"ring.directory = {ring.directory}: no such directory; use /dev/shm"]
    return [*_ring_memory_problems(config), *_ring_capacity_problems(config)]


def _ring_memory_problems(config: Config) -> list[str]:
    ring, dp = config.ring, config.parallel.dp
    needed, free = dp * ring.arena_mib, shutil.disk_usage(ring.directory).free / MIB
    if needed <= free:
        return []
    return [
        f"ring.arena_mib = {ring.arena_mib:g} x parallel.dp = {dp} needs {needed:g} MiB in"
        f" {ring.directory}, which has {free:.0f} MiB free; set ring.arena_mib ="
        f" {max(1, int(free / dp / 2))} or less, or enlarge it: mount -o"
        f" remount,size={int(needed * 2)}m {ring.directory} (in Docker: --shm-size={int(needed * 2)}m)"
    ]


def _ring_capacity_problems(config: Config) -> list[str]:
    """The trainer waits for a whole batch, so a replica's ring must be able to hold its share."""
    ring = config.ring
    problems = []
    share = config.train.samples_per_step // config.parallel.dp
    record = longest_sample(config) * RECORD_BYTES_PER_TOKEN + RECORD_FIXED_BYTES
    if share * record > ring.arena_mib * MIB:
        problems.append(
            f"ring.arena_mib = {ring.arena_mib:g} cannot hold a replica's batch of {share} samples of up to"
            f" {record} bytes; set it to {-(-2 * share * record // MIB)} or more"
        )
    if share > ring.num_slots:
        problems.append(
            f"ring.num_slots = {ring.num_slots} cannot hold a replica's batch of {share} samples;"
            f" set it to {2 * share} or more"
        )
    return problems


def _run_problems(config: Config) -> list[str]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.name):
        return [f"name = {config.name!r} is not a folder name; use letters, digits, dot, dash, underscore"]
    resume = config.checkpoint.resume
    if resume not in ("auto", "never"):
        if not Path(resume).exists():
            return [f"checkpoint.resume = {resume}: no such directory; name a run, or use auto or never"]
        return []
    if resume == "never" and config.run_dir.exists():
        return [
            f"the run {config.run_dir} exists and is not overwritten; choose another name, or continue it"
            " with checkpoint.resume=auto"
        ]
    return []
