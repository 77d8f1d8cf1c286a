"""The staleness bound and the order of release, against every completion order."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollout.admission import AdmissionError, RingBalance, Sequencer, StalenessBound, fits

Choices = st.integers(0, 2**32).map(random.Random)


class Job:
    """A trainer and a rollouter that do one thing at a time, in an order that the test chooses."""

    def __init__(self, size: int, max_staleness: int) -> None:
        self.bound = StalenessBound(size, max_staleness)
        self.sequencer = Sequencer(self.bound)
        self.version = 0
        self.next_id = 0
        self.started: dict[int, int] = {}  # running group -> version
        self.versions: dict[int, int] = {}
        self.order: list[int] = []

    def possible(self) -> list[str]:
        """What can happen next; never empty."""
        actions = []
        if self.sequencer.may_start(self.version):
            actions.append("start")
        if self.started:
            actions += ["finish", "drop"]
        if self.sequencer.next_group() is not None:
            actions.append("release")
        if len(self.order) >= (self.version + 1) * self.bound.groups_per_batch:
            actions.append("train")
        return actions

    def do(self, action: str, rng: random.Random) -> None:
        match action:
            case "start":
                self.sequencer.start(self.next_id, self.version)
                self.started[self.next_id] = self.versions[self.next_id] = self.version
                self.next_id += 1
            case "finish":
                group_id = rng.choice(sorted(self.started))
                del self.started[group_id]
                self.sequencer.finish(group_id)
            case "drop":
                group_id = rng.choice(sorted(self.started))
                del self.started[group_id]
                self.sequencer.drop(group_id)
            case "release":
                group_id = self.sequencer.next_group()
                assert group_id is not None
                assert self.sequencer.release(group_id) == len(self.order)
                self.order.append(group_id)
            case "train":
                self.version += 1

    def check(self) -> None:
        """Staleness of everything in a batch: the batch's index, which is its version, less the start's."""
        for position, group_id in enumerate(self.order):
            staleness = self.bound.batch_of(position) - self.versions[group_id]
            assert staleness <= self.bound.max_staleness, f"group {group_id} at position {position}"


@given(st.integers(1, 4), st.integers(0, 3), Choices)
@settings(max_examples=150, deadline=None)
def test_any_order_of_events_keeps_the_bound_and_never_blocks(
    size: int, max_staleness: int, rng: random.Random
) -> None:
    job = Job(size, max_staleness)
    for _ in range(150):
        actions = job.possible()
        assert actions, "nothing can happen any more"
        # the adversary holds groups back, and drops seldom
        weights = [{"finish": rng.choice([1, 9]), "drop": 0.3}.get(a, 5) for a in actions]
        job.do(rng.choices(actions, weights)[0], rng)
    job.check()


@given(st.integers(1, 4), st.integers(0, 3), Choices)
@settings(max_examples=60, deadline=None)
def test_a_group_that_finishes_unblocks_everything_in_the_end(
    size: int, max_staleness: int, rng: random.Random
) -> None:
    """Hold one group as long as anything else can happen: all stops behind it, and goes on once it ends."""
    job = Job(size, max_staleness)
    held = rng.randrange(size * (max_staleness + 1))
    for _ in range(400):
        actions = [a for a in job.possible() if a != "drop"]
        free = sorted(g for g in job.started if g != held)
        if "finish" in actions and not free:
            actions.remove("finish")
        if not actions:
            break
        if (action := rng.choice(actions)) == "finish":
            group_id = rng.choice(free)
            del job.started[group_id]
            job.sequencer.finish(group_id)
        else:
            job.do(action, rng)
    assert len(job.order) < size * (job.started[held] + max_staleness + 1)
    assert job.sequencer.blocking() == (held,)
    job.sequencer.finish(held)
    del job.started[held]
    for _ in range(400):
        action = rng.choice([a for a in job.possible() if a != "drop"])
        job.do(action, rng)
    assert held in job.order
    job.check()


@pytest.mark.parametrize(("size", "max_staleness"), itertools.product([1, 2], [0, 1, 2]))
def test_every_reachable_state_of_a_small_job(size: int, max_staleness: int) -> None:
    """Exhaustive: all interleavings of start, finish, release and train; groups of one age are alike."""
    seen: set[tuple[object, ...]] = set()
    stack: list[tuple[tuple[str, int], ...]] = [()]
    while stack:
        path = stack.pop()
        job = replayed(size, max_staleness, path)
        job.check()
        waiting = [job.versions[g] for g in job.versions if g not in job.started and g not in job.order]
        running = sorted(job.started.values())
        key = (job.version, tuple(running), tuple(sorted(waiting)), len(job.order))
        if key in seen or job.version == 3:
            continue
        seen.add(key)
        steps = [(action, 0) for action in job.possible() if action not in ("finish", "drop")]
        steps += [("finish", version) for version in set(running)]
        assert steps, f"deadlock after {path}"
        stack += [(*path, s) for s in steps]
    assert len(seen) > 5


def replayed(size: int, max_staleness: int, path: tuple[tuple[str, int], ...]) -> Job:
    job = Job(size, max_staleness)
    for action, version in path:
        if action == "finish":
            group_id = min(g for g, v in job.started.items() if v == version)
            del job.started[group_id]
            job.sequencer.finish(group_id)
        else:
            job.do(action, random.Random(0))
    return job


def test_staleness_zero_is_synchronous() -> None:
    job = Job(size=3, max_staleness=0)
    rng = random.Random(1)
    for version in range(3):
        for _ in range(3):
            job.do("start", rng)
        assert not job.sequencer.may_start(version), "the next version's groups wait for it"
        for _ in range(3):
            job.do("finish", rng)
            job.do("release", rng)
        job.do("train", rng)
    assert [job.versions[g] for g in job.order] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_short_group_overtakes_until_the_long_one_is_due() -> None:
    sequencer = Sequencer(StalenessBound(groups_per_batch=2, max_staleness=1))
    for group_id in range(4):
        sequencer.start(group_id, 0)
    for group_id in (3, 1, 2):
        sequencer.finish(group_id)
    released = []
    while (group_id := sequencer.next_group()) is not None:
        sequencer.release(group_id)
        released.append(group_id)
    assert released == [3, 1, 2], "the last place of batch 1 is still there for group 0"
    assert sequencer.blocking() == (0,)
    assert not sequencer.may_start(0)


def test_the_last_place_of_the_due_batch_is_kept() -> None:
    sequencer = Sequencer(StalenessBound(groups_per_batch=1, max_staleness=1))
    sequencer.start(0, 0)
    sequencer.start(1, 0)
    sequencer.finish(1)
    assert sequencer.next_group() == 1
    sequencer.release(1)
    sequencer.start(2, 1)
    sequencer.finish(2)
    assert sequencer.next_group() is None, "batch 1 is the last for group 0"
    with pytest.raises(AdmissionError, match="out of order"):
        sequencer.release(2)
    sequencer.finish(0)
    assert sequencer.next_group() == 0


def test_one_group_too_many_is_refused() -> None:
    sequencer = Sequencer(StalenessBound(groups_per_batch=1, max_staleness=0))
    sequencer.start(0, 0)
    assert not sequencer.may_start(0)
    with pytest.raises(AdmissionError, match="one too many"):
        sequencer.start(1, 0)


@pytest.mark.parametrize(
    ("unreleased", "num_released", "expected"),
    [
        ({}, 9, True),
        ({0: 2}, 0, True),
        ({0: 3}, 0, False),
        ({0: 2}, 1, False),
        ({0: 1, 1: 3}, 0, True),
        ({0: 1, 1: 4}, 0, False),
    ],
)
def test_fits_counts_places(unreleased: dict[int, int], num_released: int, expected: bool) -> None:
    assert fits(unreleased, num_released, groups_per_batch=2) is expected


@given(st.integers(1, 4), st.integers(1, 4), Choices)
@settings(max_examples=50, deadline=None)
def test_rings_get_equal_shares_of_groups(num_rings: int, share: int, rng: random.Random) -> None:
    size = num_rings * share
    balance = RingBalance(size, num_rings)
    for batch_idx in range(3):
        placements = [balance.place(batch_idx * size + i, rng.randint(1, 1000)) for i in range(size)]
        assert {p.batch_idx for p in placements} == {batch_idx}
        assert [sum(p.ring_idx == r for p in placements) for r in range(num_rings)] == [share] * num_rings


def test_rings_are_balanced_in_tokens() -> None:
    balance = RingBalance(4, 2)
    assert [balance.place(i, tokens).ring_idx for i, tokens in enumerate([100, 10, 20, 30])] == [0, 1, 1, 0]


def test_an_unequal_share_is_refused() -> None:
    with pytest.raises(AdmissionError, match="5 groups per batch are no equal share of 2 rings"):
        RingBalance(5, 2)
