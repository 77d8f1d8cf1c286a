"""The learning rate of every update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

LrShape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class LrSchedule:
    """A linear rise over ``warmup_steps``, then ``peak``, or a fall from there to 0 at ``total_steps``.

    ``linear``: peak * left, ``cosine``: peak * (1 - cos(pi * left)) / 2, with left the part of the steps
    after the warm-up that is yet to come (Loshchilov and Hutter, SGDR, 2017, eq. 5, one period).
    """

    peak: float = 1e-6
    shape: LrShape = "constant"
    warmup_steps: int = 0
    total_steps: int = 0  # not used by constant

    def rate(self, update_idx: int) -> float:
        """The rate of the update with this 0-based index; 0 from ``total_steps`` on, but for constant."""
        if update_idx < self.warmup_steps:
            return self.peak * (update_idx + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        left = (self.total_steps - update_idx) / max(1, self.total_steps - self.warmup_steps)
        left = min(1.0, max(0.0, left))
        return self.peak * (left if self.shape == "linear" else (1 - math.cos(math.pi * left)) / 2)
