"""The records that flow through asyncrl, one frozen dataclass per stage.

    Prompt -> Trajectory of Segments -> Sample -> SampleGroup -> ring -> trainer

Invariants that every constructor checks:

* a model token carries the logprob and the policy version under which it was sampled;
* tool and template tokens carry neither and are masked out of the loss;
* all per-token arrays of a sample have the same length.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

PolicyVersion = int
"""Number of publications so far: 0 is the model that the run started from, +1 per publication."""

NO_VERSION: PolicyVersion = -1
"""The version entry of a token that no policy sampled (prompt, tool and template tokens)."""


class SegmentKind(enum.StrEnum):
    """Who wrote a run of tokens."""

    MODEL = "model"
    TOOL = "tool"
    TEMPLATE = "template"


class FinishReason(enum.StrEnum):
    """Why a trajectory ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task.

    ``prompt_idx`` is its position in the (endless, resumable) prompt stream; ``row`` is the data
    row that it came from, handed to the reward unchanged.
    """

    prompt_idx: int
    messages: tuple[Mapping[str, str], ...]
    token_ids: tuple[int, ...]
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one kind and, for model tokens, of one policy version."""

    kind: SegmentKind
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    policy_version: PolicyVersion = NO_VERSION

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("an empty segment carries no version and is not recorded")
        if self.kind is SegmentKind.MODEL:
            if len(self.logprobs) != len(self.token_ids):
                raise ValueError(
                    f"a model segment of {len(self.token_ids)} tokens has {len(self.logprobs)} logprobs"
                )
            if self.policy_version < 0:
                raise ValueError("a model segment needs the policy version that sampled it")
        elif self.logprobs or self.policy_version != NO_VERSION:
            raise ValueError(f"a {self.kind} segment carries neither logprobs nor a policy version")


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One finished, rewarded trajectory; T tokens, prompt included.

    ``group_rewards`` holds the rewards of all n siblings in sample order, so that a group-relative
    advantage needs no other record.
    """

    group_id: int
    sample_idx: int
    num_prompt_tokens: int
    reward: float
    finish_reason: FinishReason
    token_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.uint8]  # [T], 1 on model tokens
    behav_logprobs: npt.NDArray[np.float32]  # [T], 0 where the mask is 0
    policy_versions: npt.NDArray[np.int32]  # [T], NO_VERSION where the mask is 0
    group_rewards: npt.NDArray[np.float32]  # [n]

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        for name in ("loss_mask", "behav_logprobs", "policy_versions"):
            length = len(getattr(self, name))
            if length != num_tokens:
                raise ValueError(f"{name} has {length} entries, token_ids has {num_tokens}")
        if not 0 <= self.sample_idx < len(self.group_rewards):
            raise ValueError(f"sample_idx {self.sample_idx} outside a group of {len(self.group_rewards)}")
        if not 0 < self.num_prompt_tokens <= num_tokens:
            raise ValueError(f"num_prompt_tokens {self.num_prompt_tokens} of {num_tokens} tokens")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def sampled_versions(self) -> npt.NDArray[np.int32]:
        """The versions of the model tokens alone, [num model tokens]."""
        versions: npt.NDArray[np.int32] = self.policy_versions[self.loss_mask != 0]
        return versions

    @property
    def min_version(self) -> PolicyVersion:
        versions = self.sampled_versions
        return int(versions.min()) if len(versions) else NO_VERSION

    @property
    def max_version(self) -> PolicyVersion:
        versions = self.sampled_versions
        return int(versions.max()) if len(versions) else NO_VERSION


@dataclass(frozen=True, slots=True, eq=False)
class SampleGroup:
    """The n samples of one prompt."""

    group_id: int
    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(sample.reward for sample in self.samples)


def build_sample(
    *,
    group_id: int,
    sample_idx: int,
    prompt_ids: Sequence[int],
    segments: Sequence[Segment],
    reward: float,
    finish_reason: FinishReason,
    group_rewards: Sequence[float],
) -> Sample:
    """Lay a trajectory's segments out as the per-token arrays of a `Sample`."""
    token_ids = list(prompt_ids)
    mask = [0] * len(prompt_ids)
    logprobs = [0.0] * len(prompt_ids)
    versions = [NO_VERSION] * len(prompt_ids)
    for segment in segments:
        count = len(segment.token_ids)
        is_model = segment.kind is SegmentKind.MODEL
        token_ids += segment.token_ids
        mask += [int(is_model)] * count
        logprobs += segment.logprobs if is_model else [0.0] * count
        versions += [segment.policy_version] * count
    return Sample(
        group_id=group_id,
        sample_idx=sample_idx,
        num_prompt_tokens=len(prompt_ids),
        reward=reward,
        finish_reason=finish_reason,
        token_ids=np.asarray(token_ids, np.int32),
        loss_mask=np.asarray(mask, np.uint8),
        behav_logprobs=np.asarray(logprobs, np.float32),
        policy_versions=np.asarray(versions, np.int32),
        group_rewards=np.asarray(group_rewards, np.float32),
    )
