"""The rollouter's settings, gathered from the sections of the configuration that concern it."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.rollout.admission import StalenessBound
from asyncrl.rollout.journal import JournalSettings


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What one rollouter does. Times are seconds, lengths are tokens."""

    groups_per_batch: int
    samples_per_group: int
    num_rings: int
    max_staleness: int  # policy versions
    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    request_timeout_s: float  # one request to an engine
    progress_timeout_s: float  # longest time in which nothing at all happens
    reward_timeout_s: float  # one reward, with the time that it queues
    max_reward_error_rate: float
    num_batches: int | None = None  # stop issuing after these; None: until stopped
    sampling_seed: int | None = None  # for engines in deterministic mode

    @classmethod
    def from_config(
        cls, config: Config, stop_token_ids: tuple[int, ...], *, seeded_engines: bool = False
    ) -> RolloutSettings:
        """``stop_token_ids`` are the tokenizer's; ``seeded_engines``: they run in deterministic mode."""
        return cls(
            groups_per_batch=config.train.prompts_per_step,
            samples_per_group=config.train.samples_per_prompt,
            num_rings=config.parallel.dp,
            max_staleness=config.rollout.max_staleness,
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            stop_token_ids=stop_token_ids,
            request_timeout_s=config.rollout.request_timeout_s,
            progress_timeout_s=config.train.batch_timeout_s,
            # a reward limits its own time, but may have many in its queue
            reward_timeout_s=config.train.batch_timeout_s,
            max_reward_error_rate=config.reward.max_error_rate,
            num_batches=config.train.steps,
            sampling_seed=config.rollout.seed if seeded_engines else None,
        )

    @property
    def bound(self) -> StalenessBound:
        return StalenessBound(self.groups_per_batch, self.max_staleness)

    @property
    def journal(self) -> JournalSettings:
        return JournalSettings(self.groups_per_batch, self.samples_per_group, self.max_staleness)

    def sample_ids(self, group_id: int) -> range:
        """The ledger's ids of a group's samples."""
        return range(group_id * self.samples_per_group, (group_id + 1) * self.samples_per_group)
