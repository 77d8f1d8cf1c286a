"""The schedule against torch's own schedulers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from asyncrl.algo.learning_rate import LrSchedule, LrShape


def rates_of_torch(shape: str, peak: float, warmup: int, total: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    fall = total - warmup
    main: Any = {
        "constant": lambda: LinearLR(optimizer, 1.0, 1.0, total),
        "linear": lambda: LinearLR(optimizer, 1.0, 0.0, fall),
        "cosine": lambda: CosineAnnealingLR(optimizer, fall),
    }[shape]()
    # torch's warm-up of n steps starts at 1/n and is at the peak after n - 1.
    rise = LinearLR(optimizer, 1 / max(1, warmup), 1.0, max(1, warmup - 1))
    scheduler: Any = SequentialLR(optimizer, [rise, main], [warmup]) if warmup else main
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 18), (4, 18), (1, 2), (0, 1)])
def test_as_torch(shape: LrShape, warmup: int, total: int) -> None:
    schedule = LrSchedule(3e-5, shape, warmup, total)
    rates = [schedule.rate(idx) for idx in range(total)]
    assert rates == pytest.approx(rates_of_torch(shape, 3e-5, warmup, total), abs=1e-12)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_ends_at_zero_and_stays(shape: LrShape) -> None:
    schedule = LrSchedule(1.0, shape, 2, 10)
    assert schedule.rate(9) > 0
    assert schedule.rate(10) == schedule.rate(99) == 0


def test_warmup_as_long_as_the_run() -> None:
    schedule = LrSchedule(1.0, "cosine", 4, 4)
    assert [schedule.rate(idx) for idx in range(5)] == [0.25, 0.5, 0.75, 1.0, 0.0]
