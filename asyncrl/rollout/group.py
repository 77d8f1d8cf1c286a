"""A group in flight: its prompt, its samples' trajectories and rewards, and where it ended up."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.engines.base import Engine
from asyncrl.rollout.records import JournaledGroup, SampleRewarded
from asyncrl.rollout.settings import RolloutSettings
from asyncrl.rollout.trajectory import Trajectory, TrajectoryError, TrajectorySpec, replay
from asyncrl.types import PolicyVersion, Prompt, SampleGroup, build_sample


@dataclass(frozen=True, slots=True)
class Request:
    """A request that is in flight."""

    rid: str
    engine_name: str
    engine: Engine


@dataclass(slots=True)
class LiveSample:
    """One sample; ``reward`` is set once it is durable."""

    sample_idx: int
    trajectory: Trajectory
    reward: SampleRewarded | None = None
    request: Request | None = None
    num_requests: int = 0  # in this life of the process
    num_lost: int = 0  # requests whose engine failed


@dataclass(slots=True)
class LiveGroup:
    """Mutable, owned by the rollouter's event loop."""

    group_id: int
    prompt: Prompt
    start_version: PolicyVersion
    samples: tuple[LiveSample, ...]
    dropped: bool = False
    engine_name: str | None = None  # the replica that last had it

    @property
    def rewarded(self) -> bool:
        return all(sample.reward is not None for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """Prompt and new tokens of all samples: what training this group costs."""
        return sum(len(s.trajectory.prefix) for s in self.samples)


@dataclass(frozen=True, slots=True)
class Rewarded:
    """A complete group: the records for the trainer beside what a reader of the rollouts wants to know."""

    samples: SampleGroup
    trajectories: tuple[Trajectory, ...]
    rewards: tuple[SampleRewarded, ...]
    num_requests: tuple[int, ...]


def new_group(
    group_id: int, prompt: Prompt, start_version: PolicyVersion, settings: RolloutSettings
) -> LiveGroup:
    """A group of which nothing was generated yet."""
    return restored_group(JournaledGroup(group_id, prompt.prompt_idx, start_version), prompt, settings)


def restored_group(journaled: JournaledGroup, prompt: Prompt, settings: RolloutSettings) -> LiveGroup:
    """The group as its journal left it: every trajectory at its last saved token."""
    spec = TrajectorySpec(prompt.token_ids, settings.max_new_tokens, settings.stop_token_ids)
    samples = tuple(
        LiveSample(idx, replay(spec, journaled.events.get(idx, ())), journaled.rewards.get(idx))
        for idx in range(settings.samples_per_group)
    )
    return LiveGroup(journaled.group_id, prompt, journaled.start_version, samples)


def complete(group: LiveGroup) -> Rewarded:
    """The records of a group; raises TrajectoryError unless all samples are finished and rewarded."""
    rewards = tuple(s.reward for s in group.samples if s.reward is not None)
    trajectories = tuple(s.trajectory for s in group.samples)
    reasons = tuple(t.finish_reason for t in trajectories if t.finish_reason is not None)
    if not len(rewards) == len(reasons) == len(trajectories):
        raise TrajectoryError(f"group {group.group_id} has {len(rewards)} rewards of {len(trajectories)}")
    scores = tuple(reward.score for reward in rewards)
    samples = tuple(
        build_sample(
            group_id=group.group_id,
            sample_idx=s.sample_idx,
            prompt_ids=group.prompt.token_ids,
            segments=s.trajectory.segments,
            reward=scores[s.sample_idx],
            finish_reason=reasons[s.sample_idx],
            group_rewards=scores,
        )
        for s in group.samples
    )
    return Rewarded(
        SampleGroup(group.group_id, group.prompt, samples),
        trajectories,
        rewards,
        tuple(s.num_requests for s in group.samples),
    )
