"""Which checkpoint to resume from, and saving the next one with a Hugging Face folder beside it.

runs/NAME/checkpoints/iter_0000010/       Megatron's distributed checkpoint (any layout can load it)
                      iter_0000010_hf/    the same weights for everybody else
                      latest_checkpointed_iteration.txt
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.config import Config
from asyncrl.weights.export import write_hf
from megatron_ext.checkpoint import latest, load, save
from megatron_ext.policy import MegatronPolicy


class CheckpointMissing(RuntimeError):
    """checkpoint.resume names a place without a checkpoint."""


def export_hf(policy: MegatronPolicy, directory: Path, config: Config) -> None:
    """Write the current weights as a Hugging Face folder, replacing one that is there; collective."""
    if dist.get_rank() == 0:
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(directory, ignore_errors=True)
    dist.barrier()
    write_hf(
        directory,
        config.model.path,
        policy.geometry,
        policy.layouts(),
        policy.tensors(),
        getattr(torch, config.model.dtype),
    )


class Checkpoints:
    """The checkpoints of one run; all ranks call each method together."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._directory = config.run_dir / "checkpoints"

    def restore(self, policy: MegatronPolicy) -> int:
        """Load what ``checkpoint.resume`` says into the policy; returns the number of steps done, 0 for none.

        Raises:
            CheckpointMissing: a path was named and no checkpoint is there.
        """
        resume = self._config.checkpoint.resume
        if resume == "never":
            return 0
        path = latest(self._directory) if resume == "auto" else _named(Path(resume))
        if path is None:
            if resume == "auto":
                return 0
            raise CheckpointMissing(
                f"checkpoint.resume = {resume}: no complete checkpoint there; name a run directory, its"
                " checkpoints folder or one checkpoint in it, or use auto or never"
            )
        return int(load(policy, path)["step"])

    def save(self, policy: MegatronPolicy, step: int, common: dict[str, Any]) -> None:
        """Write checkpoint ``step``; when this returns it is durable and older ones are pruned."""
        settings = self._config.checkpoint
        path = save(policy, self._directory, {**common, "step": step}, keep=settings.keep)
        if settings.export_hf:
            export_hf(policy, path.with_name(f"{path.name}_hf"), self._config)
        if dist.get_rank() == 0:
            for folder in self._directory.glob("iter_*_hf"):
                if not folder.with_name(folder.name.removesuffix("_hf")).exists():
                    shutil.rmtree(folder)

    def oldest_step(self) -> int:
        """The step of the oldest complete checkpoint."""
        return min(int(path.name.removeprefix("iter_")) for path in self._directory.glob("iter_???????"))


def _named(path: Path) -> Path | None:
    """The checkpoint that a run directory, a checkpoints folder or a checkpoint's own folder means."""
    if path.name.startswith("iter_"):
        return path if path.is_dir() else None
    newest: Path | None = latest(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    return newest
