"""What can go wrong in the ring. Every message carries the numbers and says what to do."""

from __future__ import annotations


class RingError(Exception):
    """Base of all errors of the ring. The ring itself is unharmed by any of them."""


class RingClosed(RingError):
    """A put after `close`, or a get after `close` when everything was drained."""


class RingTimeout(RingError, TimeoutError):
    """A deadline passed; the message names whom the wait was for."""


class LockTimeout(RingTimeout):
    """The metadata lock is held by a live process that does not run (stopped, or stuck in the kernel)."""


class RingFull(RingError):
    """No room, and the handle's policy is to fail."""


class RecordTooLarge(RingError, ValueError):
    """A record above the ring's `max_record_bytes`."""


class RecordStale(RingError, ValueError):
    """A record whose policy version is below the ring's `min_version`."""


class KeyTooOld(RingError, ValueError):
    """A publication key so far back that it is no longer known whether it was published."""


class NotAMember(RingError):
    """A rank that is not in the group, or a group that is not there."""


class MemberBusy(RingError):
    """Another live process has this rank of the group."""


class RingLimit(RingError):
    """One of the ring's fixed tables (participants, groups, producers) is full."""


class RingExists(RingError, FileExistsError):
    """`Ring.create` where a ring is."""


class RingMissing(RingError, FileNotFoundError):
    """`Ring.open` where no ring is."""


class RingCorrupt(RingError):
    """The ring, or a record of it, is damaged or truncated."""


class NotARing(RingCorrupt):
    """The file is something else."""


class RingAbiMismatch(RingCorrupt):
    """The ring was made by an incompatible version of asyncrl."""


class RingNoSpace(RingError, OSError):
    """The file system cannot hold the ring."""


class RingDetached(RingError):
    """The handle was detached, or belongs to the parent of this forked process."""


class WrongRole(RingError):
    """A put through a handle that is no producer, or a group on one that is no reader."""


class BatchReleased(RingError):
    """Use of a batch after its release."""


class ViewsAlive(RingError, BufferError):
    """A release while arrays over the records are alive."""


class RingSystemError(RingError, OSError):
    """A system call failed."""
