"""What the journal remembers: an append-only sequence of records, folded into the state of every group.

    GroupStarted -> SampleAdvanced* -> SampleRewarded (per sample) -> GroupReleased | GroupDropped
    BatchesAcknowledged, whenever the trainer has made a checkpoint durable

`fold` is the only reader of records, whatever store they come from, and refuses a sequence that no
rollouter could have written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from asyncrl.rollout.trajectory import DurableEvent
from asyncrl.types import PolicyVersion


class JournalError(RuntimeError):
    """The journal cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class GroupStarted:
    """Prompt ``prompt_idx`` was issued as group ``group_id`` at policy version ``start_version``."""

    group_id: int
    prompt_idx: int
    start_version: PolicyVersion


@dataclass(frozen=True, slots=True)
class SampleAdvanced:
    """A trajectory took a durable event: segments were generated, or observed."""

    group_id: int
    sample_idx: int
    event: DurableEvent


@dataclass(frozen=True, slots=True)
class SampleRewarded:
    """A finished trajectory was scored."""

    group_id: int
    sample_idx: int
    score: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupReleased:
    """The group has its place in the order of training; written before it is put into a ring."""

    group_id: int
    position: int


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """Nothing will train this group."""

    group_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class BatchesAcknowledged:
    """Batches below ``num_batches`` are in a durable checkpoint; no kept checkpoint is older than
    ``oldest_kept``, so that the tokens of batches below it can be forgotten."""

    num_batches: int
    oldest_kept: int


Record = GroupStarted | SampleAdvanced | SampleRewarded | GroupReleased | GroupDropped | BatchesAcknowledged


@dataclass(slots=True)
class JournaledGroup:
    """A group as the journal knows it; ``events`` and ``rewards`` by sample index."""

    group_id: int
    prompt_idx: int
    start_version: PolicyVersion
    events: dict[int, list[DurableEvent]] = field(default_factory=dict)
    rewards: dict[int, SampleRewarded] = field(default_factory=dict)
    position: int | None = None
    drop_reason: str | None = None


@dataclass(slots=True)
class JournalState:
    """Everything that was issued, in order; batches below ``oldest_kept`` have lost their tokens."""

    groups: dict[int, JournaledGroup] = field(default_factory=dict)
    num_acknowledged: int = 0  # batches
    oldest_kept: int = 0  # batch


def fold(records: Iterable[Record]) -> JournalState:
    """Replay records in the order in which they were written.

    Raises:
        JournalError: a record names an unknown group, repeats one, or leaves a hole in the positions.
    """
    state = JournalState()
    num_released = 0
    for record in records:
        match record:
            case BatchesAcknowledged():
                state.num_acknowledged = record.num_batches
                state.oldest_kept = max(state.oldest_kept, record.oldest_kept)
            case GroupStarted():
                if record.group_id != len(state.groups):
                    raise JournalError(
                        f"the journal issues group {record.group_id} after {len(state.groups)}"
                    )
                state.groups[record.group_id] = JournaledGroup(
                    record.group_id, record.prompt_idx, record.start_version
                )
            case GroupReleased():
                if record.position != num_released:
                    raise JournalError(f"the journal has position {record.position} after {num_released}")
                _live_group(state, record).position = record.position
                num_released += 1
            case GroupDropped():
                _live_group(state, record).drop_reason = record.reason
            case SampleAdvanced():
                _live_group(state, record).events.setdefault(record.sample_idx, []).append(record.event)
            case SampleRewarded():
                rewards = _live_group(state, record).rewards
                if record.sample_idx in rewards:
                    raise JournalError(f"the journal rewards a sample of group {record.group_id} twice")
                rewards[record.sample_idx] = record
    return state


def _live_group(
    state: JournalState, record: SampleAdvanced | SampleRewarded | GroupReleased | GroupDropped
) -> JournaledGroup:
    group = state.groups.get(record.group_id)
    if group is None or group.position is not None or group.drop_reason is not None:
        what = "was never issued" if group is None else "has ended"
        kind = type(record).__name__
        raise JournalError(f"the journal has a {kind} of group {record.group_id}, which {what}")
    return group
