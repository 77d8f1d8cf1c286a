"""Wait for the death of processes that are not our children, and learn what they died of.

A pidfd names one process for ever (a pid is reused). Linux 6.15 and later also tell the exit status
through it (`PIDFD_GET_INFO` with `PIDFD_INFO_EXIT`, include/uapi/linux/pidfd.h); older kernels only tell
that the process is gone.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct

# struct pidfd_info in its first version, 64 bytes:
# mask u64, cgroupid u64, pid, tgid, ppid and eight ids u32, exit_code i32
_INFO = struct.Struct("=QQ11Ii")
_INFO_EXIT = 1 << 3
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11  # _IOWR(0xFF, 11, struct pidfd_info)


def exit_status(pidfd: int) -> int | None:
    """The wait status of a process that has exited, or None where the kernel does not tell."""
    request = bytearray(_INFO.size)
    _INFO.pack_into(request, 0, _INFO_EXIT, *([0] * 13))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, request)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(request)
    return int(status) if mask & _INFO_EXIT else None


def describe_status(status: int | None) -> str:
    """A wait status in words."""
    if status is None:
        return "exited (this kernel does not tell how)"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hint = "; the kernel's out-of-memory killer sends this" if number == signal.SIGKILL else ""
        return f"killed by {signal.Signals(number).name} ({number}){hint}"
    return f"exited with status {os.WEXITSTATUS(status)}"
