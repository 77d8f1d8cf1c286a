"""From a journal to a rollouter's state: what is acknowledged, what is put again, what goes on.

    batch < start_batch                acknowledged: the checkpoint contains it
    released, batch >= start_batch     put again, same positions, same order
    started, not released              goes on from its saved prefixes (or its rewards)
    never started                      the next prompt is the one after the last that was started

A checkpoint may be older than the journal. Everything released stays where it was released: version v
existed only after batches 0 .. v-1 were complete, so the trainer reaches every version that a group
waits for with the batches that are put again, and the staleness bound holds with the old deadlines.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from asyncrl.control.ledger import Ledger, SampleState
from asyncrl.rollout.admission import Sequencer
from asyncrl.rollout.group import LiveGroup, LiveSample, restored_group
from asyncrl.rollout.records import JournaledGroup, JournalError, JournalState
from asyncrl.rollout.settings import RolloutSettings
from asyncrl.types import Prompt


class PromptSource(Protocol):
    """An endless stream of prompts with random access; the same index gives the same prompt."""

    def prompt_at(self, prompt_idx: int) -> Prompt: ...


@dataclass(frozen=True, slots=True)
class Restored:
    """A rollouter's state before its first step; for an empty journal: the beginning."""

    ledger: Ledger
    sequencer: Sequencer
    released: tuple[tuple[int, LiveGroup], ...]  # (position, group) from start_batch on, in order
    unreleased: tuple[LiveGroup, ...]
    next_group_id: int


def restore(
    state: JournalState, prompts: PromptSource, settings: RolloutSettings, start_batch: int
) -> Restored:
    """Rebuild from a folded journal, for a trainer that begins with batch ``start_batch``.

    Raises:
        JournalError: the journal does not reach the checkpoint, or has forgotten tokens that it needs.
    """
    by_position = _released_in_order(state)
    _check_reach(state, len(by_position), settings, start_batch)
    num_acknowledged = start_batch * settings.groups_per_batch

    def revive(group: JournaledGroup) -> LiveGroup:
        return restored_group(group, prompts.prompt_at(group.prompt_idx), settings)

    released = tuple((position, revive(g)) for position, g in by_position[num_acknowledged:])
    open_groups = [g for g in state.groups.values() if g.position is None and g.drop_reason is None]
    unreleased = tuple(revive(g) for g in open_groups)
    return Restored(
        _ledger(state, settings, num_acknowledged, released, unreleased),
        _sequencer(settings, len(by_position), unreleased),
        released,
        unreleased,
        len(state.groups),
    )


def _released_in_order(state: JournalState) -> list[tuple[int, JournaledGroup]]:
    released = [(g.position, g) for g in state.groups.values() if g.position is not None]
    return sorted(released, key=lambda pair: pair[0])


def _check_reach(state: JournalState, num_released: int, settings: RolloutSettings, start_batch: int) -> None:
    if start_batch * settings.groups_per_batch > num_released:
        raise JournalError(
            f"the trainer begins with batch {start_batch}, but the rollout journal has released only"
            f" {num_released} groups of {settings.groups_per_batch} per batch; it belongs to another run"
        )
    if start_batch < state.oldest_kept:
        raise JournalError(
            f"the trainer begins with batch {start_batch}, but the rollout journal has kept no tokens"
            f" of batches before {state.oldest_kept}; resume from a checkpoint that is not older"
        )


def _ledger(
    state: JournalState,
    settings: RolloutSettings,
    num_acknowledged: int,
    released: tuple[tuple[int, LiveGroup], ...],
    unreleased: tuple[LiveGroup, ...],
) -> Ledger:
    n = settings.samples_per_group
    dropped = Counter(g.drop_reason for g in state.groups.values() if g.drop_reason is not None)
    ledger = Ledger(
        next_id=len(state.groups) * n,
        acknowledged=num_acknowledged * n,
        dropped={reason: count * n for reason, count in dropped.items()},
    )
    for _, group in released:
        ledger.restore(settings.sample_ids(group.group_id), SampleState.IN_RING)
    for group in unreleased:
        ids = settings.sample_ids(group.group_id)
        for sample in group.samples:
            ledger.restore([ids[sample.sample_idx]], _sample_state(sample))
    return ledger


def _sample_state(sample: LiveSample) -> SampleState:
    if sample.reward is not None:
        return SampleState.REWARDED
    if sample.trajectory.finished:
        return SampleState.RUNNING  # its reward is still to come
    return SampleState.INTERRUPTED if sample.trajectory.segments else SampleState.PENDING


def _sequencer(settings: RolloutSettings, num_released: int, unreleased: tuple[LiveGroup, ...]) -> Sequencer:
    sequencer = Sequencer(settings.bound, num_released)
    for group in unreleased:
        sequencer.start(group.group_id, group.start_version)
    for group in unreleased:
        if group.rewarded:
            sequencer.finish(group.group_id)
    return sequencer
