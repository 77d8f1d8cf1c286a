"""Changes between two buckets: exact to the bit, refused where they would be longer, checked when applied."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.weights.wire import WeightUpdateError, apply_changes, bytes_per_change, changes_between


def random_bucket(num_bytes: int, seed: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@given(st.integers(1, 400), st.floats(0, 1), st.integers(0, 1000))
def test_changes_turn_the_old_bucket_into_the_new_one(num_bytes: int, share: float, seed: int) -> None:
    old, other = random_bucket(num_bytes, seed), random_bucket(num_bytes, seed + 1)
    chosen = torch.rand(num_bytes, generator=torch.Generator().manual_seed(seed)) < share
    new = torch.where(chosen, other, old)
    changes = changes_between(old, new)
    if changes is None:
        size = 2 if num_bytes % 2 == 0 else 1
        differing = {at // size for at in range(num_bytes) if old[at] != new[at]}
        assert len(differing) * bytes_per_change(num_bytes) >= num_bytes
        return
    assert changes.dtype == torch.uint8 and len(changes) < num_bytes
    count, rest = divmod(len(changes), bytes_per_change(num_bytes))
    assert rest == 0
    apply_changes(old, changes, count)
    assert torch.equal(old, new)


def test_signs_of_zero_and_nans_are_kept() -> None:
    """Bits are compared, not numbers: -0.0 equals 0.0, and a NaN nothing."""
    old = torch.zeros(64)
    old[5] = torch.nan
    new = old.clone()
    new[3] = -0.0
    changes = changes_between(old.view(torch.uint8), new.view(torch.uint8))
    assert changes is not None and len(changes) == 6, "the sign alone; the NaN did not change"
    apply_changes(old.view(torch.uint8), changes, 1)
    assert torch.signbit(old[3]) and torch.isnan(old[5])


@pytest.mark.parametrize("index", [-1, 32])
def test_a_change_outside_of_the_bucket_is_refused(index: int) -> None:
    bucket = random_bucket(64, 0)
    before = bucket.clone()
    told = torch.tensor([index], dtype=torch.int32).view(torch.uint8)
    changes = torch.cat([told, torch.zeros(2, dtype=torch.uint8)])
    with pytest.raises(WeightUpdateError, match="outside of a bucket of 64 bytes"):
        apply_changes(bucket, changes, 1)
    assert torch.equal(bucket, before)
