"""The ledger against a plain dictionary, and what it refuses."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.control.ledger import Ledger, LedgerCounts, LedgerError, SampleState

S = SampleState
MOVES = {
    (S.PENDING, S.RUNNING),
    (S.RUNNING, S.INTERRUPTED),
    (S.RUNNING, S.REWARDED),
    (S.INTERRUPTED, S.RUNNING),
    (S.REWARDED, S.IN_RING),
    (S.IN_RING, S.CONSUMED),
    (S.CONSUMED, S.IN_RING),
    (S.CONSUMED, S.ACKNOWLEDGED),
}
DROPPABLE = {S.PENDING, S.RUNNING, S.INTERRUPTED, S.REWARDED}
PATH = {
    S.PENDING: (),
    S.RUNNING: (S.RUNNING,),
    S.INTERRUPTED: (S.RUNNING, S.INTERRUPTED),
    S.REWARDED: (S.RUNNING, S.REWARDED),
    S.IN_RING: (S.RUNNING, S.REWARDED, S.IN_RING),
    S.CONSUMED: (S.RUNNING, S.REWARDED, S.IN_RING, S.CONSUMED),
}


def ledger_with(state: SampleState) -> Ledger:
    ledger = Ledger()
    ledger.issue([0])
    for to in PATH[state]:
        ledger.move([0], to)
    return ledger


@pytest.mark.parametrize("start", list(PATH))
@pytest.mark.parametrize("to", [s for s in SampleState if s is not S.DROPPED])
def test_only_the_drawn_moves_are_possible(start: SampleState, to: SampleState) -> None:
    ledger = ledger_with(start)
    before = ledger.counts()
    if (start, to) in MOVES:
        ledger.move([0], to)
        assert ledger.counts().issued == 1
    else:
        with pytest.raises(LedgerError, match=f"sample 0 cannot go from {start} to {to}"):
            ledger.move([0], to)
        assert ledger.counts() == before


@pytest.mark.parametrize("start", list(PATH))
def test_a_sample_is_dropped_only_before_it_is_in_the_ring(start: SampleState) -> None:
    ledger = ledger_with(start)
    if start in DROPPABLE:
        ledger.drop([0], "reward_error")
        assert ledger.counts() == LedgerCounts(issued=1, dropped={"reward_error": 1})
    else:
        with pytest.raises(LedgerError, match="cannot go"):
            ledger.drop([0], "reward_error")
        assert ledger.counts().num_dropped == 0


def test_an_id_is_issued_once() -> None:
    ledger = Ledger()
    ledger.issue([0, 1])
    with pytest.raises(LedgerError, match="sample 1 was issued before; the next id is 2"):
        ledger.issue([1])


def test_terminal_and_unknown_samples_are_told_apart() -> None:
    ledger = ledger_with(S.CONSUMED)
    ledger.move([0], S.ACKNOWLEDGED)
    with pytest.raises(LedgerError, match="sample 0 ended"):
        ledger.move([0], S.IN_RING)
    with pytest.raises(LedgerError, match="sample 7 was never issued"):
        ledger.state(7)


def test_a_move_is_all_or_nothing() -> None:
    ledger = Ledger()
    ledger.issue([0, 1])
    ledger.move([0], S.RUNNING)
    before = ledger.counts()
    for sample_ids in ([0, 1], [1, 1]):
        with pytest.raises(LedgerError):
            ledger.move(sample_ids, S.RUNNING)
        assert ledger.counts() == before


def test_an_earlier_life_is_part_of_the_sum() -> None:
    ledger = Ledger(next_id=10, acknowledged=4, dropped={"reward_error": 2})
    ledger.restore([6, 7], S.IN_RING)
    ledger.restore([8, 9], S.INTERRUPTED)
    ledger.issue([10])
    counts = ledger.counts()
    assert (counts.issued, counts.accounted, counts.in_ring, counts.interrupted) == (11, 11, 2, 2)
    for sample_ids, state in (([8], S.PENDING), ([11], S.PENDING), ([5], S.ACKNOWLEDGED)):
        with pytest.raises(LedgerError):
            ledger.restore(sample_ids, state)


def test_counts_survive_json() -> None:
    counts = LedgerCounts(issued=5, running=2, consumed=1, dropped={"reward_error": 2})
    assert LedgerCounts.from_json(json.loads(json.dumps(counts.to_json()))) == counts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"issued": 6}, "issued 6 samples but 5"),
        ({"extra": 1}, "have the keys"),
        ({"dropped": {"a": 3}}, "issued 5 samples but 6"),
    ],
)
def test_wrong_counts_are_refused(change: dict[str, object], message: str) -> None:
    tree = LedgerCounts(issued=5, running=2, consumed=1, dropped={"a": 2}).to_json()
    with pytest.raises(LedgerError, match=message):
        LedgerCounts.from_json(tree | change)


class LedgerMachine(RuleBasedStateMachine):
    """The model: a dictionary from id to state, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.model: dict[int, str] = {}

    @rule(count=st.integers(1, 3))
    def issue(self, count: int) -> None:
        ids = range(len(self.model), len(self.model) + count)
        self.ledger.issue(ids)
        self.model |= dict.fromkeys(ids, "pending")

    @precondition(lambda self: self.model)
    @rule(data=st.data(), to=st.sampled_from([s for s in SampleState if s is not S.DROPPED]))
    def move(self, data: st.DataObject, to: SampleState) -> None:
        sample_id = data.draw(st.sampled_from(sorted(self.model)))
        if (self.model[sample_id], to) in {(a.value, b) for a, b in MOVES}:
            self.ledger.move([sample_id], to)
            self.model[sample_id] = to.value
        else:
            with pytest.raises(LedgerError):
                self.ledger.move([sample_id], to)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), reason=st.sampled_from(["reward_error", "overlong"]))
    def drop(self, data: st.DataObject, reason: str) -> None:
        sample_id = data.draw(st.sampled_from(sorted(self.model)))
        if self.model[sample_id] in {s.value for s in DROPPABLE}:
            self.ledger.drop([sample_id], reason)
            self.model[sample_id] = f"dropped {reason}"

    @invariant()
    def same_counts(self) -> None:
        counts = self.ledger.counts().to_json()
        expected = Counter(self.model.values())
        dropped = {k.removeprefix("dropped "): v for k, v in expected.items() if k.startswith("dropped")}
        assert counts.pop("dropped") == dropped
        assert counts.pop("issued") == len(self.model)
        assert counts == {name: expected[name] for name in counts}


LedgerMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
