"""The pure machine of publications: what a refill may do, and what it leaves behind."""

from __future__ import annotations

import pytest

from asyncrl.control import protocol
from asyncrl.control.messages import EngineStatus
from asyncrl.control.protocol import Refused
from tests.unit.scripted_fleet import PLAN

SERVING, JOINING = EngineStatus.SERVING, EngineStatus.JOINING
QUARANTINED, PREPARED, LOST = EngineStatus.QUARANTINED, EngineStatus.PREPARED, EngineStatus.LOST


def machine(**statuses: EngineStatus) -> protocol.Fleet:
    """At version 3; who serves has a plan."""
    members = {
        name: protocol.Member(
            name,
            0,
            status,
            version=3 if status is SERVING else -1,
            plan=PLAN if status is SERVING else None,
        )
        for name, status in statuses.items()
    }
    return protocol.Fleet(committed=3, epoch=7, members=members)


@pytest.mark.parametrize("status", [JOINING, QUARANTINED])
def test_a_refill_brings_the_committed_version_and_no_plan(status: EngineStatus) -> None:
    fleet = protocol.prepare_refill(machine(a=SERVING, b=status), "b", "a")
    assert fleet.flight is not None and (fleet.flight.version, fleet.flight.source) == (3, "a")
    assert (fleet.members["a"].status, fleet.members["b"].status) == (SERVING, PREPARED)
    fleet = protocol.begin_transfer(fleet, 3, 7)
    fleet = protocol.verified(fleet, 3, 7, "b")
    assert not protocol.violations(fleet)
    fleet = protocol.commit(fleet, 3, 7)
    assert (fleet.committed, fleet.epoch) == (3, 8)
    assert (fleet.members["b"].status, fleet.members["b"].version, fleet.members["b"].plan) == (
        SERVING,
        3,
        None,
    )
    fleet = protocol.rejoin(fleet, "b")
    assert (fleet.members["b"].status, fleet.members["b"].version) == (SERVING, 3)
    fleet = protocol.joined(fleet, "b", PLAN)
    assert fleet.members["b"].plan == PLAN and fleet.members["b"].status is SERVING
    with pytest.raises(Refused, match="b is serving and cannot join"):
        protocol.rejoin(fleet, "b")
    with pytest.raises(Refused, match="was not joining"):
        protocol.joined(fleet, "b", PLAN)


def test_a_refill_that_is_given_up_leaves_its_target_to_others() -> None:
    prepared = protocol.prepare_refill(machine(a=SERVING, b=QUARANTINED), "b", "a")
    fleet = protocol.abort(prepared, 3, 7, "a is gone")
    assert fleet.members["b"].status is JOINING and fleet.members["b"].reason == "a is gone"
    assert protocol.prepare_refill(fleet, "b", "a").flight is not None
    fleet = protocol.abort(protocol.begin_transfer(prepared, 3, 7), 3, 7, "a is gone")
    assert fleet.members["b"].status is QUARANTINED and fleet.members["a"].status is SERVING


def test_a_failure_of_the_source_does_not_count() -> None:
    fleet = protocol.begin_transfer(protocol.prepare_refill(machine(a=SERVING, b=JOINING), "b", "a"), 3, 7)
    assert protocol.failed(fleet, "b", "a is gone", counts=False).members["b"].num_failures == 0
    assert protocol.failed(fleet, "b", "digests differ").members["b"].num_failures == 1


@pytest.mark.parametrize(
    ("statuses", "refusal"),
    [
        ({"a": QUARANTINED, "b": JOINING}, "cannot come from a, which is quarantined"),
        ({"a": SERVING, "b": SERVING}, "is not for b, which is serving and has a plan"),
        ({"a": SERVING, "b": LOST}, "is not for b, which is lost and needs no version"),
        ({"a": PREPARED, "b": JOINING}, "cannot come from a, which is prepared"),
    ],
)
def test_refusals_name_both_engines(statuses: dict[str, EngineStatus], refusal: str) -> None:
    with pytest.raises(Refused, match=rf"a refill of b from a with version 3 \(epoch 7\) {refusal}"):
        protocol.prepare_refill(machine(**statuses), "b", "a")


def test_a_refill_is_the_only_flight_and_comes_after_a_publication() -> None:
    fleet = protocol.prepare_refill(machine(a=SERVING, b=JOINING, c=JOINING), "b", "a")
    with pytest.raises(Refused, match="cannot be prepared while version 3"):
        protocol.prepare_refill(fleet, "c", "a")
    with pytest.raises(Refused, match=r"version 4 .* cannot be prepared while version 3"):
        protocol.prepare(fleet, 4, 7, {"a": PLAN})
    fresh = protocol.register(protocol.register(protocol.Fleet(), "a", 0), "b", 0)
    with pytest.raises(Refused, match="before a version is published"):
        protocol.prepare_refill(fresh, "b", "a")
