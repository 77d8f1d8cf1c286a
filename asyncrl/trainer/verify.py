"""After a publication: does the engine compute what the trainer computes?

Enabled by ``weights.verify``. For fixed prompts the trainer computes its own logprobs with the weights that
it just published; the engine's come with the coordinator's result, together with checksums of every
parameter on every engine rank. Both go to events.jsonl, beside a Hugging Face export of the version, so
that an engine loaded from that folder can be compared too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.config import Config
from asyncrl.control.messages import PublicationResult
from asyncrl.observe.events import EventLog
from asyncrl.trainer.checkpoints import export_hf
from asyncrl.types import PolicyVersion
from megatron_ext.packing import TrainSequence, pack
from megatron_ext.policy import MegatronPolicy


class WeightMismatch(RuntimeError):
    """Engine and trainer disagree although the publication was verified."""


class Verifier:
    """All ranks call `compare` together."""

    def __init__(
        self,
        policy: MegatronPolicy,
        prompts: Sequence[tuple[int, ...]],
        tolerance: float,
        config: Config,
        events: EventLog | None,
    ) -> None:
        self._policy = policy
        self._prompts = prompts
        self._tolerance = tolerance
        self._config = config
        self._events = events  # on rank 0 only

    def compare(self, version: PolicyVersion, result: PublicationResult | None) -> None:
        """Record both sides' logprobs; ``result`` is known on rank 0 only.

        Raises:
            WeightMismatch: a logprob differs by more than the tolerance, naming prompt and position.
        """
        trainer = [self._trainer_logprobs(prompt) for prompt in self._prompts]
        export_hf(self._policy, self._config.run_dir / "verify" / f"version_{version}", self._config)
        if result is None or self._events is None:
            return
        for name, verification in result.verification.items():
            difference, where = _largest_difference(trainer, verification.logprobs)
            self._events.write(
                "verification",
                version=version,
                engine=name,
                max_logprob_difference=difference,
                checksums=list(verification.checksums),
            )
            if difference > self._tolerance:
                raise WeightMismatch(
                    f"version {version}: {name} and the trainer differ by {difference:.2e} nats at {where}"
                    f" (allowed {self._tolerance:.0e}); the published weights are not the trained ones"
                )

    def _trainer_logprobs(self, prompt: tuple[int, ...]) -> list[float]:
        """log p(token i | tokens before) for i = 1 .. T-1."""
        size = len(prompt)
        zeros = np.zeros(size, np.float32)
        sequence = TrainSequence(
            token_ids=np.asarray(prompt, np.int32),
            loss_mask=np.asarray([0] + [1] * (size - 1), np.uint8),
            behav_logprobs=zeros,
            prox_logprobs=None,
            advantages=zeros,
            loss_weights=zeros,
            staleness=np.zeros(size, np.int32),
        )
        logprobs = self._policy.compute_logprobs([pack([sequence], self._policy.layout.pad_multiple)])[0]
        return [float(value) for value in logprobs[: size - 1]]


def _largest_difference(
    trainer: Sequence[Sequence[float]], engine: Sequence[Sequence[float]]
) -> tuple[float, str]:
    worst, where = 0.0, "nowhere"
    for prompt_idx, (ours, theirs) in enumerate(zip(trainer, engine, strict=True)):
        for position, (own, other) in enumerate(zip(ours, theirs, strict=True), start=1):
            if not abs(own - other) <= worst:  # also true for nan
                worst, where = abs(own - other), f"prompt {prompt_idx}, token {position}"
    return worst, where
