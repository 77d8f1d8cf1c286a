"""Publication between real processes over gloo: byte-equal to the reference; a refusal ends in an error.

All cases go through one launch of four trainer and four engine processes; a case takes those that it needs.
Deaths, and what follows from them, are in test_publish_faults.py.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.forked import run_launcher

LAUNCH_TIMEOUT_S = 240
NUM_PORTS = 14
"""Of a case: the trainer's group; four engines'; their weight groups; those of who comes back; two links."""

LAYOUTS: list[dict[str, Any]] = [
    {"name": "one-to-one"},
    {"name": "tp2-to-one", "tp": 2, "family": "qwen2"},
    {"name": "tp2-to-tp2", "tp": 2, "engines": [2], "family": "qwen3"},
    {"name": "pp2-tied-to-two-engines", "pp": 2, "engines": [1, 1]},
    {"name": "pp2-vpp2-to-tp2", "pp": 2, "vpp": 2, "engines": [2], "family": "qwen2"},
    {"name": "tp2-pp2-to-tp2", "tp": 2, "pp": 2, "engines": [2]},
    {"name": "tp2-pp2-to-one", "tp": 2, "pp": 2, "family": "qwen3"},
    {"name": "tp4-fewer-kv-heads", "tp": 4, "engines": [2], "geometry": {"num_kv_heads": 2}},
    {"name": "replicated-kv-head", "tp": 2, "engines": [2], "geometry": {"num_kv_heads": 1}},
    {"name": "dp2-shares-the-sending", "dp": 2, "engines": [2], "family": "qwen2"},
    {"name": "dp2-tp2", "tp": 2, "dp": 2, "engines": [1, 1]},
    {"name": "float32-to-bfloat16", "tp": 2, "engines": [2], "engine_dtype": "bfloat16"},
    {"name": "bfloat16-to-float32", "pp": 2, "engines": [2], "trainer_dtype": "bfloat16"},
    {"name": "bfloat16", "tp": 2, "engines": [2], "trainer_dtype": "bfloat16", "engine_dtype": "bfloat16"},
    {"name": "one-bucket", "tp": 2, "engines": [2], "bucket_bytes": 1 << 20},
]
MOE, MLA = {"family": "qwen3_moe"}, {"family": "deepseek_v3"}
EXPERTS: list[dict[str, Any]] = [
    {"name": "moe-to-one", **MOE},
    {"name": "moe-ep2-to-ep2", **MOE, "dp": 2, "ep": 2, "engines": [2], "engine_ep": 2},
    {"name": "moe-ep2-to-tp2", **MOE, "tp": 2, "ep": 2, "engines": [2]},
    {"name": "moe-etp2-to-ep2", **MOE, "tp": 2, "etp": 2, "engines": [2], "engine_ep": 2},
    {"name": "moe-pp2-ep2-grouped-to-tp4-ep2", **MOE, "pp": 2, "dp": 2, "ep": 2}
    | {"te": True, "grouped": True, "engines": [4], "engine_ep": 2},
    {"name": "moe-tp2-dp2-ep4-to-two-engines", **MOE, "tp": 2, "dp": 2, "ep": 4, "engines": [2, 2]},
    {"name": "mla-to-one", **MLA},
    {"name": "mla-ep2-to-ep2", **MLA, "tp": 2, "ep": 2, "engines": [2], "engine_ep": 2},
    {"name": "mla-pp2-te-to-tp2", **MLA, "pp": 2, "te": True, "engines": [2]},
    {"name": "mla-pp2-tp2-ep2-to-ep4", **MLA, "tp": 2, "pp": 2, "ep": 2, "engines": [4], "engine_ep": 4},
    {"name": "mla-no-q-lora", "family": "deepseek_v3_no_q_lora", "dp": 2, "ep": 2, "engines": [1, 1]},
    {"name": "mla-bfloat16", **MLA, "tp": 2, "engines": [2]}
    | {"trainer_dtype": "bfloat16", "engine_dtype": "bfloat16"},
]
# Shares of the elements that change from version to version; the last is told whole.
DELTAS: list[dict[str, Any]] = [
    {"name": "changes", "tp": 2, "pp": 2, "engines": [2], "changed": [0.02, 0.0, 0.05, 0.9]},
    {"name": "changes-to-two-engines", "dp": 2, "engines": [1, 2], "family": "qwen2", "changed": [0.02, 1.0]},
    {
        "name": "changes-in-bfloat16",
        "tp": 2,
        "engines": [2],
        "changed": [0.02, 0.0, 0.9],
        "trainer_dtype": "bfloat16",
        "engine_dtype": "bfloat16",
    },
    {"name": "changes-cast", "tp": 2, "engines": [2], "engine_dtype": "bfloat16", "changed": [0.02, 0.9]},
    {"name": "changes-widened", "pp": 2, "engines": [2], "trainer_dtype": "bfloat16", "changed": [0.02, 0.9]},
]
# Engines of fp8 blocks, which the trainer's ranks quantise; the second model's last blocks are ragged.
BLOCKS = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 4, "head_dim": 128, "ffn_hidden_size": 256}
FP8: list[dict[str, Any]] = [
    {"name": "fp8", "geometry": BLOCKS},
    {"name": "fp8-tp2-pp2-to-tp2", "geometry": BLOCKS, "tp": 2, "pp": 2, "engines": [2]},
    {"name": "fp8-dp2-bfloat16", "geometry": BLOCKS, "dp": 2, "engines": [2, 1], "trainer_dtype": "bfloat16"},
    {"name": "fp8-ragged", "geometry": {**BLOCKS, "hidden_size": 320}, "engines": [2], "family": "qwen3"},
    {"name": "fp8-relay", "geometry": BLOCKS, "engines": [2, 2], "link": "relay"},
    {"name": "fp8-staged-changes", "geometry": BLOCKS, "tp": 2, "engines": [2], "changed": [0.001, 0.0]}
    | {"staged": True},
]
# Beside what the engine serves, from a copy of parameters that change meanwhile.
STAGED: list[dict[str, Any]] = [
    {"name": "staged", "tp": 2, "pp": 2, "engines": [2]},
    {"name": "staged-to-two-engines", "dp": 2, "engines": [2, 1], "family": "qwen2"},
    {"name": "staged-experts", **MOE, "dp": 2, "ep": 2, "engines": [2], "engine_ep": 2},
    {"name": "staged-cast", "tp": 2, "engines": [2], "engine_dtype": "bfloat16"},
    {"name": "staged-changes", "tp": 2, "pp": 2, "engines": [2], "changed": [0.02, 0.0, 0.05, 0.9]},
]
# Engines that pass on to each other what each of them needs; stripes of three are never aligned.
LINKED: list[dict[str, Any]] = [
    {"name": "to-four", "engines": [1, 1, 1, 1], "family": "qwen2"},
    {"name": "tp2-pp2-to-two-of-tp2", "tp": 2, "pp": 2, "engines": [2, 2], "family": "qwen3"},
    {"name": "to-three-in-bfloat16", "dp": 2, "engines": [1, 1, 1], "engine_dtype": "bfloat16"},
    {"name": "experts", **MOE, "dp": 2, "ep": 2, "engines": [2, 2], "engine_ep": 2},
    {"name": "changes", "tp": 2, "engines": [1, 1, 1], "changed": [0.02, 0.0, 0.05, 0.9]},
    {"name": "staged-changes", "pp": 2, "engines": [2, 2], "changed": [0.02, 0.9], "staged": True},
    {"name": "one-bucket", "tp": 2, "engines": [1, 1, 1], "bucket_bytes": 1 << 22, "geometry": BLOCKS},
]
# Those that wait for a deadline come last: who has nothing to do meanwhile looks for its next rendezvous ever
# more rarely, and a case with a short deadline must not pay for that.
FAULTS: list[dict[str, Any]] = [
    {"fault": "base_spoiled", "tp": 2, "engines": [2], "changed": [0.02]},
    {"fault": "bit_flipped_in_changes", "tp": 2, "engines": [2], "changed": [0.02]},
    {"fault": "bit_flipped", "tp": 2, "engines": [2]},
    {"fault": "bit_flipped", "tp": 2, "engines": [2, 1], "staged": True},
    {"fault": "base_spoiled", "tp": 2, "engines": [2], "changed": [0.02], "staged": True},
    {"fault": "stripe_flipped", "tp": 2, "engines": [2, 2], "link": "relay"},
    {"fault": "stripe_flipped", "tp": 2, "engines": [2, 2], "link": "relay", "staged": True},
    {"fault": "other_model", "tp": 2, "engines": [2]},
    {"fault": "other_padding", "tp": 2, "engines": [2]},
    {"fault": "receiver_stalled", "tp": 2, "engines": [1, 1]},
    {"fault": "plan_mismatch"},
    {"fault": "version_mismatch"},
    {"fault": "not_linked", "engines": [1, 1], "link": "broadcast"},
    {"fault": "base_mismatch", "tp": 2, "changed": [0.02]},
]


def fault_name(case: dict[str, Any]) -> str:
    return f"{case['fault']}{'_staged' if case.get('staged') else ''}"


CASES = [
    *LAYOUTS,
    *EXPERTS,
    *DELTAS,
    *({**case, "staged": True} for case in STAGED),
    *(
        {**case, "name": f"{link}-{case['name']}", "link": link}
        for link, cases in (("relay", LINKED), ("broadcast", LINKED[::2]))
        for case in cases
    ),
    *({**case, "fp8": True, "bucket_bytes": 150_000} for case in FP8),
    *({**case, "name": fault_name(case), "bucket_bytes": 1000} for case in FAULTS),
]


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Ports that nobody else is given within the block; a listener that sets SO_REUSEADDR can take them."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", 0))
        yield [probe.getsockname()[1] for probe in probes]


def launch(directory: Path, cases: list[dict[str, Any]], worker: str) -> dict[str, list[str]]:
    """Run the cases; for each, what every process that took part reported."""
    with reserved_ports(NUM_PORTS * len(cases)) as ports:
        filled = [
            {**case, "ports": ports[NUM_PORTS * idx : NUM_PORTS * (idx + 1)]}
            for idx, case in enumerate(cases)
        ]
        (directory / "cases.json").write_text(json.dumps(filled))
        run_launcher(worker, directory, LAUNCH_TIMEOUT_S)
    return read_reports(directory)


def read_reports(directory: Path) -> dict[str, list[str]]:
    """Per case, what every process said; an empty string is a success."""
    reports: dict[str, list[str]] = {}
    for path in sorted(directory.glob("*.reports")):
        for line in path.read_text().splitlines():
            report = json.loads(line)
            said = f"{path.stem}: {report['error']}" if report["error"] else ""
            reports.setdefault(report["case"], []).append(said)
    return reports


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return launch(tmp_path_factory.mktemp("publish"), CASES, "tests.distributed.publish_worker")


@pytest.mark.parametrize("case", [case["name"] for case in CASES])
def test_publication(reports: dict[str, list[str]], case: str) -> None:
    problems = [report for report in reports[case] if report]
    assert not problems, problems
