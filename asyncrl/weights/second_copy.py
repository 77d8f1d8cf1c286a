"""A second copy of one engine rank's parameters: a version arrives in it while the engine serves another.

    begin:    a thread receives and verifies a version into the copy
    require:  that has ended well, for the version that is asked for
    copy_to:  the copy replaces the live parameters; this is all that requests wait for

One version arrives at a time. The copy is made when the first one does, and kept: it costs as much memory as
the parameters themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from asyncrl.weights.wire import Deadline, WeightUpdateError

Place = Literal["device", "host"]
"""Where the copy is: beside the parameters, or in pinned memory of the host."""


class SecondCopy:
    """Not thread-safe: the engine's own thread calls it."""

    def __init__(self, live: Sequence[torch.Tensor], place: Place) -> None:
        self._live = live
        self._place = place
        self._copy: list[torch.Tensor] = []
        self._version = -1
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def begin(self, version: int, arrive: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Call ``arrive`` with the copy, on a thread of its own; returns at once.

        Raises:
            WeightUpdateError: a version is still arriving.
        """
        if self._thread is not None and self._thread.is_alive():
            raise WeightUpdateError(f"version {self._version} is still arriving, so {version} cannot begin")
        self._version, self._failure = version, None
        self._thread = threading.Thread(
            target=self._run, args=(arrive,), name=f"stage-{version}", daemon=True
        )
        self._thread.start()

    def _run(self, arrive: Callable[[Sequence[torch.Tensor]], None]) -> None:
        try:
            if not self._copy:
                self._copy = [_like(parameter, self._place) for parameter in self._live]
            if self._live and self._live[0].is_cuda:
                # Not the one that samples; and of the parameters' device, which a new thread does not know.
                stream = torch.cuda.Stream(self._live[0].device)  # type: ignore[no-untyped-call]
                with torch.cuda.stream(stream):
                    arrive(self._copy)
                stream.synchronize()
            else:
                arrive(self._copy)
        except (RuntimeError, ValueError) as error:  # of ours, of torch's transport, out of memory
            self._failure = error

    def require(self, version: int, deadline: Deadline) -> None:
        """Wait until ``version`` has arrived and was verified.

        Raises:
            WeightUpdateError: it was not, or another version was.
        """
        if self._thread is None or self._version != version:
            raise WeightUpdateError(f"version {version} was not staged, version {self._version} was")
        self._thread.join(max(0.0, deadline.left_s))
        if self._thread.is_alive():
            raise WeightUpdateError(f"version {version} is still arriving after {deadline.timeout_s:.0f} s")
        if self._failure is not None:
            raise WeightUpdateError(str(self._failure)) from self._failure

    def copy_to(self, live: Sequence[torch.Tensor]) -> None:
        """Write the live parameters."""
        for target, source in zip(live, self._copy, strict=True):
            target.copy_(source)

    def close(self) -> None:
        """Wait for a version that still arrives; what it waits for has a deadline."""
        if self._thread is not None:
            self._thread.join()


def _like(parameter: torch.Tensor, place: Place) -> torch.Tensor:
    if place == "host" and parameter.is_cuda:
        return torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=True)
    return torch.empty_like(parameter)
