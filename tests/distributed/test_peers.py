"""Refills between real processes over gloo: byte-equal; whoever dies or refuses harms nobody else.

All cases go through one launch, four at a time, each with processes of its own (`refill_worker`).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_publish import BLOCKS, MLA, launch

EQUAL: list[dict[str, Any]] = [
    {"name": "one", "engines": [1]},
    {"name": "tp2", "engines": [2], "family": "qwen3"},
    {"name": "bfloat16", "engines": [1], "engine_dtype": "bfloat16"},
    {"name": "fp8", "engines": [2], "fp8": True, "geometry": BLOCKS, "bucket_bytes": 150_000},
    {"name": "experts", "engines": [2], **MLA},
    {"name": "one-bucket", "engines": [2], "bucket_bytes": 1 << 20},
    {"name": "rows-longer-than-buckets", "engines": [1], "bucket_bytes": 8},
]
SOURCE = [{"fault": f"source:{phase}"} for phase in ("join", "manifest", "bucket", "digests")]
TARGET = [{"fault": f"target:{phase}"} for phase in ("join", "manifest", "bucket", "digests")]
REFUSE = [
    {"fault": f"refuse:{what}"}
    for what in ("flipped bit", "other shape", "other dtype", "one more", "other version")
]
ABSENT = [{"fault": f"absent:{who}"} for who in ("target", "source")]
FAULTS: list[dict[str, Any]] = [
    {**case, "name": case["fault"], "engines": [2], "bucket_bytes": 1000}
    for case in (*SOURCE, *TARGET, *REFUSE, *ABSENT)
]
LONE: dict[str, Any] = {
    "name": "lone:source",
    "fault": "source:bucket",
    "engines": [1],
    "bucket_bytes": 1000,
}
CASES = [*EQUAL, *FAULTS, LONE]
NUM_SURVIVORS = {"source": 3, "target": 5, "refuse": 6, "absent": 4, "lone": 1}
"""Processes that report, of those of a case with a fault."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return launch(tmp_path_factory.mktemp("refill"), CASES, "tests.distributed.refill_worker")


@pytest.mark.parametrize("case", [case["name"] for case in CASES])
def test_refill(reports: dict[str, list[str]], case: str) -> None:
    problems = [report for report in reports[case] if report]
    assert not problems, problems
    if ":" in case:
        assert len(reports[case]) == NUM_SURVIVORS[case.split(":")[0]]
