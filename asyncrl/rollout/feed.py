"""First stage: prompts, in order, become groups as soon as the staleness bound allows.

prompt_at(i) --> group i at the current policy version --> journal --> one task per sample
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.rollout.group import LiveGroup, new_group
from asyncrl.rollout.records import GroupStarted
from asyncrl.rollout.restore import PromptSource
from asyncrl.rollout.state import RolloutState


class Feed:
    """Issues every prompt once; group ids are prompt indices."""

    def __init__(self, state: RolloutState, prompts: PromptSource) -> None:
        self._state = state
        self._prompts = prompts

    async def run(self, begin_group: Callable[[LiveGroup], None]) -> None:
        """Hand groups to ``begin_group``, once their start is durable, until the run is complete."""
        state = self._state
        while not state.complete:
            await state.progress.wait_until(
                lambda: state.complete or self._may_start(),
                lambda: state.gate.blocker(state.gate.version + 1),
            )
            groups = []
            while self._may_start():
                groups.append(self._issue())
            starts = (GroupStarted(g.group_id, g.prompt.prompt_idx, g.start_version) for g in groups)
            await state.commit.write(*starts)
            for group in groups:
                begin_group(group)

    def _may_start(self) -> bool:
        state = self._state
        limit = state.settings.num_batches
        if limit is not None and state.sequencer.num_started >= limit * state.settings.groups_per_batch:
            return False
        return not state.gate.paused and state.sequencer.may_start(state.gate.version)

    def _issue(self) -> LiveGroup:
        state = self._state
        group_id, version = state.next_group_id, state.gate.version
        group = new_group(group_id, self._prompts.prompt_at(group_id), version, state.settings)
        state.sequencer.start(group_id, version)
        state.ledger.issue(state.settings.sample_ids(group_id))
        state.groups[group_id] = group
        state.next_group_id += 1
        return group
