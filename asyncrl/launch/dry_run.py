"""What `asyncrl run CONFIG --dry-run` prints: layout, batch, memory, run directory, resolved configuration.

Nothing is started and nothing is written, so it answers for any world size on any machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.launch.estimate import (
    GIB,
    EngineMemory,
    RankMemory,
    batch_equation,
    engine_memory,
    memory_estimate,
)
from asyncrl.launch.model_fit import model_fit_problems
from asyncrl.weights.geometry import ModelError, ModelGeometry


def dry_run(config: Config) -> str:
    """The whole text; a model that is missing or does not fit is named where memory would be."""
    sections = (
        ("layout", layout(config)),
        ("batch", batch_equation(config)),
        ("memory per rank", _memory(config)),
        ("run directory", str(config.run_dir)),
        ("configuration", resolved_toml(config)),
    )
    return "\n\n".join(f"{title}\n{_indented(text)}" for title, text in sections) + "\n"


def layout(config: Config) -> str:
    """Which processes there will be, in two lines."""
    parallel, engine = config.parallel, config.engine
    cut = f"tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp} x dp {parallel.dp}"
    extras = [f"vpp {parallel.vpp}"] if parallel.vpp > 1 else []
    extras += ["sequence parallel"] if parallel.sequence_parallel else []
    extras += ["distributed optimizer"] if parallel.distributed_optimizer else []
    switches = f" ({', '.join(extras)})" if extras else ""
    ranks = "rank" if parallel.world_size == 1 else "ranks"
    engines = "engine" if engine.replicas == 1 else "engines"
    return (
        f"trainer: {parallel.world_size} {ranks} = {cut}{switches}, {config.model.dtype}\n"
        f"rollout: {engine.replicas} {engines} x tp {engine.tp}, {config.engine_dtype},"
        f" staleness at most {config.rollout.max_staleness}"
    )


def resolved_toml(config: Config) -> str:
    """Every setting with its value, as TOML that loads to the same configuration; unset ones are left out."""
    tree = config.model_dump(mode="json", exclude_none=True)
    tables = {name: value for name, value in tree.items() if isinstance(value, Mapping)}
    lines = [f"{name} = {_toml(value)}" for name, value in tree.items() if name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items() if item is not None)
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)  # TOML's strings, numbers and booleans are JSON's


def _memory(config: Config) -> str:
    directory = Path(config.model.path)
    try:
        geometry = ModelGeometry.from_hf(directory)
    except ModelError as error:
        return f"unknown: {error}"
    problems = model_fit_problems(config, geometry, on_cpu=False)
    if problems:
        return "\n".join(f"unknown: {problem}" for problem in problems)
    return memory_table(memory_estimate(config, geometry), engine_memory(config, geometry))


def memory_table(ranks: tuple[RankMemory, ...], engine: EngineMemory) -> str:
    """GiB per trainer rank of each pipeline stage and per engine rank; activations are an estimate."""
    header = ("GiB", "weights", "copies", "gradients", "optimizer", "activations", "KV cache", "total")
    rows = [
        (
            f"trainer, stage {rank.pp_rank}",
            *map(_gib, (rank.parameters, rank.copies, rank.gradients, rank.optimizer, rank.activations)),
            "-",
            _gib(rank.total),
        )
        for rank in ranks
    ]
    held, cache = map(_gib, (engine.parameters, engine.copies)), _gib(engine.kv_cache)
    rows.append(("engine", *held, "-", "-", "-", cache, _gib(engine.total)))
    widths = [max(len(row[idx]) for row in (header, *rows)) for idx in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if idx == 0 else cell.rjust(width)
            for idx, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, *rows)
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in text.splitlines())
