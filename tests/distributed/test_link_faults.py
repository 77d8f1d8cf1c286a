"""A linked engine dies, at every phase of a version: those that it leaves behind fail in time and go on.

All cases go through one launch, four at a time, each with processes of its own (`link_fault_worker`).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_publish import launch

STAGED_TIMEOUT_S = 30.0
"""Nobody may wait for it where a version is staged: who does is far later than `NOTICED_WITHIN_S` allows."""
FAULTS = {
    "relay": ("arrival", "exchange", "digests"),
    "broadcast": ("header", "chain", "passing"),
    "relay staged": ("exchange", "result"),
    "broadcast staged": ("header", "chain", "passing", "chain:0", "chain:2"),
}
CASES = [
    {
        "name": f"{link}:{fault}".replace(" ", "-"),
        "link": link.split()[0],
        "fault": f"link:{fault}",
        "staged": "staged" in link,
        "engines": [1] * (4 if fault[-1].isdigit() else 3),
        **({"timeout_s": STAGED_TIMEOUT_S} if "staged" in link else {}),
    }
    for link, faults in FAULTS.items()
    for fault in faults
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    shared = {"tp": 2, "bucket_bytes": 1000}
    directory = tmp_path_factory.mktemp("links")
    return launch(directory, [{**case, **shared} for case in CASES], "tests.distributed.link_fault_worker")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_death_among_linked_engines(reports: dict[str, list[str]], case: dict[str, Any]) -> None:
    said = reports[case["name"]]
    problems = [report for report in said if report]
    assert not problems, problems
    assert len(said) == 2 + len(case["engines"]) - 1, "both trainer ranks and all engines but one"
