"""What one trainer rank sends of one version, to every engine that still takes it.

    begin -> leaving -> end       a transfer; one that cannot begin, or does not end in time, loses its engine
    lost engines                  nothing more is sent to them; `require_all` says so in the end

Linked engines fail together, but those that are well must not be left waiting for a sender that has given up:
they serve on beside what arrives, or leave and come back. A sender goes on until its last engine is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from asyncrl.weights.wire import Deadline, WeightUpdateError, start_send


@dataclass(frozen=True, slots=True)
class Target:
    """An engine, and the weight group that it shares with the trainer."""

    engine: str
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Leaving:
    """A transfer that has begun."""

    engine: str
    work: dist.Work
    what: str


class Delivery:
    """One version's transfers of one trainer rank; all under one deadline."""

    def __init__(self, targets: Sequence[Target], deadline: Deadline) -> None:
        self._num_targets = len(targets)
        self._deadline = deadline
        self._lost: dict[str, str] = {}  # engine -> why

    def begin(self, target: Target, rank: int, data: torch.Tensor, what: str) -> list[Leaving]:
        """Send to one rank of the target's group; ``data`` stays unchanged until `end`.

        Returns the transfer, or nothing where the engine is lost.

        Raises:
            WeightUpdateError: no engine is left.
        """
        if target.engine in self._lost:
            return []
        try:
            return [Leaving(target.engine, start_send(target.group, rank, data), what)]
        except WeightUpdateError as error:
            self._lose(target.engine, error)
            return []

    def end(self, transfers: Sequence[Leaving]) -> None:
        """Wait for transfers.

        Raises:
            WeightUpdateError: no engine is left.
        """
        for transfer in transfers:
            if transfer.engine not in self._lost:
                try:
                    self._deadline.wait(transfer.work, transfer.what)
                except WeightUpdateError as error:
                    self._lose(transfer.engine, error)

    def require_all(self) -> None:
        """Raises `WeightUpdateError` where an engine was lost: none of those linked to it can verify."""
        if self._lost:
            raise WeightUpdateError(next(iter(self._lost.values())))

    def _lose(self, engine: str, error: WeightUpdateError) -> None:
        self._lost[engine] = str(error)
        if len(self._lost) == self._num_targets:
            self.require_all()
