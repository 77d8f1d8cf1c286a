"""Faults in publications between real processes over gloo, in every phase; who is lost comes back whole.

All cases go through one launch, four at a time, each with processes of its own (`fault_worker`).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_publish import launch

PHASES = ("connect", "header", "bucket", "digests")
SENDER: list[dict[str, Any]] = [{"fault": f"sender:{phase}", "engines": [2]} for phase in PHASES]
ENGINE: list[dict[str, Any]] = [{"fault": f"engine:{phase}", "engines": [2, 1]} for phase in PHASES]
REFILL: list[dict[str, Any]] = [
    {"fault": f"refill:{how}", "engines": [2, 1], "changed": [0.05]}  # version 2 is told as changes
    for how in ("flipped bit", "stalled", "other plan")
]
STAGED: list[dict[str, Any]] = [
    {"fault": "sender:bucket", "engines": [2]},
    {"fault": "sender:digests", "engines": [2]},
    *({"fault": f"engine:{phase}", "engines": [2, 1]} for phase in ("header", "bucket", "digests", "result")),
    {"fault": "refill:flipped bit", "engines": [2, 1], "changed": [0.05]},
]
FAULTS = [*SENDER, *ENGINE, *REFILL, *({**case, "staged": True} for case in STAGED)]
CASES = [
    {**case, "name": case["fault"] + (":staged" if "staged" in case else ""), "tp": 2, "bucket_bytes": 1000}
    for case in FAULTS
]
NUM_SURVIVORS = {"sender": 3, "engine": 6, "refill": 5}
"""Processes that report, of those of a case."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return launch(tmp_path_factory.mktemp("faults"), CASES, "tests.distributed.fault_worker")


@pytest.mark.parametrize("case", [case["name"] for case in CASES])
def test_fault(reports: dict[str, list[str]], case: str) -> None:
    problems = [report for report in reports[case] if report]
    assert not problems, problems
    assert len(reports[case]) == NUM_SURVIVORS[case.split(":")[0]]
