"""A linked engine dies, at every phase of a version: those that it leaves behind fail in time and go on.

All cases go through one launch, four at a time, each with processes of its own (`link_fault_worker`).
"""

from __future__ import annotations

import pytest

from tests.distributed.test_publish import launch

PHASES = {
    "relay": ("arrival", "exchange", "digests"),
    "broadcast": ("header", "chain", "passing"),
}
CASES = [
    {"name": f"{link}:{phase}", "link": link, "fault": f"link:{phase}"}
    for link, phases in PHASES.items()
    for phase in phases
] + [
    {"name": f"{link}:{phase}:staged", "link": link, "fault": f"link:{phase}", "staged": True}
    for link, phase in (("relay", "result"), ("broadcast", "passing"))
]
NUM_SURVIVORS = 4


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    shared = {"tp": 2, "engines": [1, 1, 1], "bucket_bytes": 1000}
    directory = tmp_path_factory.mktemp("links")
    return launch(directory, [{**case, **shared} for case in CASES], "tests.distributed.link_fault_worker")


@pytest.mark.parametrize("case", [case["name"] for case in CASES])
def test_death_among_linked_engines(reports: dict[str, list[str]], case: str) -> None:
    problems = [report for report in reports[case] if report]
    assert not problems, problems
    assert len(reports[case]) == NUM_SURVIVORS
