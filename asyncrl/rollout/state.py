"""What the three stages of a rollouter share. One event loop owns it; no stage keeps a copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.control.ledger import Ledger
from asyncrl.engines.base import Engine
from asyncrl.rollout.admission import Sequencer
from asyncrl.rollout.batches import BatchBook
from asyncrl.rollout.commit import GroupCommit
from asyncrl.rollout.gate import Gate
from asyncrl.rollout.group import LiveGroup
from asyncrl.rollout.journal import JournalStore
from asyncrl.rollout.restore import Restored
from asyncrl.rollout.router import Router
from asyncrl.rollout.settings import RolloutSettings
from asyncrl.rollout.waiting import Progress, loop_time


@dataclass(slots=True)
class RolloutState:
    """``groups`` are those issued and not yet released or dropped, by id."""

    settings: RolloutSettings
    ledger: Ledger
    sequencer: Sequencer
    book: BatchBook
    groups: dict[int, LiveGroup]
    next_group_id: int
    num_put: int  # groups that are in the rings, from position 0 on
    progress: Progress
    gate: Gate
    router: Router
    commit: GroupCommit

    @property
    def complete(self) -> bool:
        """Whether every batch of a limited run is in the rings."""
        limit = self.settings.num_batches
        return limit is not None and self.num_put >= limit * self.settings.groups_per_batch

    def requests_in_flight(self) -> list[str]:
        """One line per request that an engine has."""
        return [
            f"sample {sample.sample_idx} of prompt {group.prompt.prompt_idx} on {sample.request.engine_name}"
            for group in self.groups.values()
            for sample in group.samples
            if sample.request is not None
        ]


def begin(
    restored: Restored,
    engines: Mapping[str, Engine],
    journal: JournalStore,
    settings: RolloutSettings,
    start_batch: int,
) -> RolloutState:
    """The state of a rollouter whose trainer begins with batch ``start_batch``."""
    progress = Progress(settings.progress_timeout_s)
    book = BatchBook(restored.ledger, settings, start_batch)
    for position, group in restored.released:
        book.released(group.group_id, position)
    return RolloutState(
        settings=settings,
        ledger=restored.ledger,
        sequencer=restored.sequencer,
        book=book,
        groups={group.group_id: group for group in restored.unreleased},
        next_group_id=restored.next_group_id,
        num_put=start_batch * settings.groups_per_batch,
        progress=progress,
        gate=Gate(progress, start_batch),
        router=Router(engines, loop_time),
        commit=GroupCommit(journal),
    )
