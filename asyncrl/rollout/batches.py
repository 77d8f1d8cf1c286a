"""Which groups make up which batch, from their release until a checkpoint has them.

released --> consumed (trained) --> acknowledged (durable), each for whole batches in order
"""

from __future__ import annotations

from asyncrl.control.ledger import Ledger, SampleState
from asyncrl.rollout.settings import RolloutSettings
from asyncrl.rollout.waiting import RolloutError


class BatchBook:
    """Moves the samples of batches through the ledger; begins at batch ``start_batch``."""

    def __init__(self, ledger: Ledger, settings: RolloutSettings, start_batch: int) -> None:
        self._ledger = ledger
        self._settings = settings
        self._groups: dict[int, list[int]] = {}  # batch -> group ids, not acknowledged
        self._num_consumed = start_batch
        self._num_acknowledged = start_batch

    def released(self, group_id: int, position: int) -> None:
        """The group has its place; the ledger already says that it is in the ring."""
        self._groups.setdefault(self._settings.bound.batch_of(position), []).append(group_id)

    def consumed(self, num_batches: int) -> None:
        """The trainer has taken batches below ``num_batches``.

        Raises:
            RolloutError: one of them was never complete.
        """
        for batch_idx in range(self._num_consumed, num_batches):
            size = len(self._groups.get(batch_idx, ()))
            if size != self._settings.groups_per_batch:
                raise RolloutError(
                    f"the trainer reports batch {batch_idx} as taken, of which only {size} groups of"
                    f" {self._settings.groups_per_batch} were released; it reads the rings of another run"
                )
            self._move(batch_idx, SampleState.CONSUMED)
            self._num_consumed = batch_idx + 1

    def acknowledged(self, num_batches: int) -> bool:
        """Batches below ``num_batches`` are durable; returns whether that is news.

        Raises:
            RolloutError: one of them was not consumed.
        """
        if num_batches > self._num_consumed:
            raise RolloutError(
                f"a checkpoint of {num_batches} batches, of which {self._num_consumed} are trained"
            )
        news = num_batches > self._num_acknowledged
        for batch_idx in range(self._num_acknowledged, num_batches):
            self._move(batch_idx, SampleState.ACKNOWLEDGED)
            del self._groups[batch_idx]
            self._num_acknowledged = batch_idx + 1
        return news

    def _move(self, batch_idx: int, to: SampleState) -> None:
        for group_id in self._groups[batch_idx]:
            self._ledger.move(self._settings.sample_ids(group_id), to)
