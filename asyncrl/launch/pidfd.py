"""Learn what a process that is not our child died of.

While it is a zombie, /proc/PID/stat tells (to its user and to root). Once its parent has reaped it, Linux
6.15 and later tell through a pidfd (`PIDFD_GET_INFO` with `PIDFD_INFO_EXIT`, include/uapi/linux/pidfd.h);
older kernels only tell that it is gone.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
from pathlib import Path

# struct pidfd_info in its first version, 64 bytes:
# mask u64, cgroupid u64, pid, tgid, ppid and eight ids u32, exit_code i32
_INFO = struct.Struct("=QQ11Ii")
_INFO_EXIT = 1 << 3
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11  # _IOWR(0xFF, 11, struct pidfd_info)


def exit_status(pidfd: int, pid: int, patience_s: float = 0.5) -> int | None:
    """The wait status of a process that has exited, or None where the kernel does not tell.

    The two sources may both be silent for a moment, while the parent is reaping.
    """
    deadline = time.monotonic() + patience_s
    while True:
        for status in (_zombie_status(pid), _reaped_status(pidfd)):
            if status is not None:
                return status
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)


def _zombie_status(pid: int) -> int | None:
    """Field 52 of proc(5)'s stat, valid while the state (field 3) is Z."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[49]) if fields[0] == "Z" else None


def _reaped_status(pidfd: int) -> int | None:
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
