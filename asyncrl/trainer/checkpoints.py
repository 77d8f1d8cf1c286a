"""Which checkpoint to resume from, and saving the next one with a Hugging Face folder beside it.

runs/NAME/checkpoints/iter_0000010/      Megatron's distributed checkpoint (any layout can load it)
                      iter_0000010/hf/   the same weights for everybody else
                      latest_checkpointed_iteration.txt
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config import CheckpointConfig
from megatron_ext.checkpoint import checkpoint_steps, load_checkpoint, save_checkpoint
from megatron_ext.policy import MegatronPolicy


class CheckpointMissing(RuntimeError):
    """checkpoint.resume names a place without a checkpoint."""


class Checkpoints:
    """The checkpoints of one run; all ranks call each method together."""

    def __init__(self, directory: Path, model_dir: Path, settings: CheckpointConfig) -> None:
        self._directory = directory
        self._model_dir = model_dir
        self._settings = settings

    def restore(self, policy: MegatronPolicy) -> int:
        """Load what ``checkpoint.resume`` says into the policy; returns the number of steps done, 0 for none.

        Raises:
            CheckpointMissing: a path was named and no checkpoint is there.
        """
        if self._settings.resume == "never":
            return 0
        source = self._directory if self._settings.resume == "auto" else self._named(self._settings.resume)
        steps = checkpoint_steps(source)
        if not steps:
            if self._settings.resume == "auto":
                return 0
            raise CheckpointMissing(
                f"checkpoint.resume = {self._settings.resume}: no complete checkpoint there;"
                " name a run directory or its checkpoints folder, or use auto or never"
            )
        common: dict[str, Any] = load_checkpoint(policy, source, steps[-1])
        return int(common["step"])

    @staticmethod
    def _named(resume: str) -> Path:
        path = Path(resume)
        return path / "checkpoints" if (path / "checkpoints").is_dir() else path

    def save(self, policy: MegatronPolicy, step: int, common: dict[str, Any]) -> None:
        """Write checkpoint ``step``; when this returns it is durable and older ones are pruned."""
        save_checkpoint(
            policy,
            self._directory,
            step,
            common,
            keep=self._settings.keep,
            hf_source=self._model_dir if self._settings.export_hf else None,
        )

    def oldest_step(self) -> int:
        """The step of the oldest complete checkpoint."""
        return checkpoint_steps(self._directory)[0]
