"""Batches on loan from the ring, and the records in them.

A `Batch` keeps its records in place. Arrays made by `Record.numpy` and `Record.torch` lie over the ring's own
memory, without a copy; each of them keeps the batch's lease too. Two ends are told apart:

* *acknowledge*: this rank has learned from the batch and must never see it again, even if it is killed the
  next moment;
* *release*: nobody looks at the bytes any more, so that producers may have the room.

Leaving the ``with`` block releases, or leaves that to the last array if some are alive. A batch that is
released, or dropped, without having been acknowledged is delivered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from asyncrl.ring.codec import read_sample
from asyncrl.ring.errors import ViewsAlive
from asyncrl.types import PolicyVersion, Sample

if TYPE_CHECKING:
    import torch


class Record:
    """One record of a batch."""

    __slots__ = ("_idx", "_lease")

    def __init__(self, lease: Any, idx: int) -> None:
        self._lease = lease
        self._idx = idx

    def numpy(self, name: str) -> npt.NDArray[Any]:
        """A read-only array over the field, without a copy."""
        view: npt.NDArray[Any] = self._lease.view(self._idx, name, False)
        return view

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Read-only arrays over all array fields, without a copy; cheaper than one by one."""
        views: dict[str, npt.NDArray[Any]] = self._lease.views(self._idx)
        return views

    def values(self) -> dict[str, Any]:
        """`arrays`, and the scalars and strings."""
        values: dict[str, Any] = self._lease.values(self._idx)
        return values

    def torch(self, name: str) -> torch.Tensor:
        """A tensor over the field, without a copy. The memory is read-only: writing to it ends the process
        with SIGSEGV rather than change what other ranks read; clone it first."""
        import torch

        return torch.from_numpy(self._lease.view(self._idx, name, True))

    def scalar(self, name: str) -> int | float | str:
        """A scalar field."""
        value: int | float | str = self._lease.scalar(self._idx, name)
        return value

    def sample(self) -> Sample:
        """A copy, independent of the ring."""
        return read_sample(self)

    @property
    def min_version(self) -> PolicyVersion:
        """Oldest policy version in the record."""
        version: int = self._lease.min_version(self._idx)
        return version

    @property
    def max_version(self) -> PolicyVersion:
        """Newest policy version in the record."""
        version: int = self._lease.max_version(self._idx)
        return version

    def verify(self) -> None:
        """Compare the bytes with the checksum that the record was published with, if it was.

        Raises:
            RingCorrupt: they differ.
        """
        self._lease.verify(self._idx)


class Batch:
    """Records in delivery order, the same on every rank of the group."""

    __slots__ = ("_ack_on_release", "_lease", "_note", "_noted")

    def __init__(self, lease: Any, ack_on_release: bool, note: Callable[[Any], None] | None) -> None:
        """``note`` takes the lease instead of acknowledging it now (mode "checkpoint")."""
        self._lease = lease
        self._ack_on_release = ack_on_release
        self._note = note
        self._noted = False

    def __len__(self) -> int:
        return len(self._lease)

    def __getitem__(self, idx: int) -> Record:
        size = len(self._lease)
        if not -size <= idx < size:
            raise IndexError(f"record {idx} of a batch of {size}")
        return Record(self._lease, idx % size)

    def __iter__(self) -> Iterator[Record]:
        return (Record(self._lease, idx) for idx in range(len(self)))

    @property
    def begin(self) -> int:
        """Position of the first record in the group's log."""
        position: int = self._lease.begin
        return position

    @property
    def end(self) -> int:
        """Position after the last record; a checkpoint stores it to resume from."""
        position: int = self._lease.end
        return position

    @property
    def acknowledged(self) -> bool:
        done: bool = self._lease.acknowledged
        return done

    def values(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """`Record.values` of every record, or only the fields named, without a copy; much cheaper than one by
        one.

        Raises:
            KeyError: the records have no such field.
        """
        values: list[dict[str, Any]] = self._lease.all_values(names)
        return values

    def samples(self) -> list[Sample]:
        """Copies of all records."""
        return [record.sample() for record in self]

    def ack(self) -> None:
        """Acknowledge the whole batch for this rank; with acknowledgement mode "checkpoint", note it until
        `Group.commit`. Views stay valid."""
        if self._note is None:
            self._lease.ack()
        elif not self._noted:
            self._noted = True
            self._note(self._lease)

    def release(self) -> None:
        """End the loan.

        Raises:
            ViewsAlive: arrays over the records exist; nothing was released.
        """
        if self._lease.num_views:
            raise ViewsAlive(
                f"{self._lease.num_views} views of the batch's {len(self)} records are alive; drop them first"
            )
        self._end()

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error is None)

    def _end(self, ack: bool = True) -> None:
        if self._noted:
            return  # the group has the lease until `commit`
        if self._ack_on_release and ack and not self._lease.released:
            self._lease.finish()
        else:
            self._lease.release_when_unused()
