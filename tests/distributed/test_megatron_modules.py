"""Names, shapes and numbering of the layouts against real Megatron modules of the families with experts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from asyncrl.weights.megatron_layout import MegatronCoord, megatron_shards
from tests.distributed.forked import REPO
from tests.shard_reference import geometry

CASES = [
    ["qwen3_moe", 1, 1, 1, 1],
    ["qwen3_moe", 2, 1, 4, 1],
    ["qwen3_moe", 4, 1, 2, 2],
    ["deepseek_v3", 1, 1, 4, 1],
    ["deepseek_v3", 2, 2, 2, 2],
    ["deepseek_v3_no_q_lora", 2, 1, 1, 1],
]


def test_layouts_are_those_of_real_modules() -> None:
    command = [sys.executable, "-m", "tests.distributed.megatron_modules_worker", json.dumps(CASES)]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command,
        env=environment,
        cwd=REPO,
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [item["case"] for item in told] == CASES
    for item in told:
        family, tp, _, ep, etp = item["case"]
        for rank in item["ranks"]:
            tp_rank, ep_rank, etp_rank = rank["coord"]
            numbers, ends = tuple(rank["layer_numbers"]), (rank["first"], rank["last"])
            coord = MegatronCoord(tp, tp_rank, numbers, *ends, 128, ep, ep_rank, etp, etp_rank)
            shards = megatron_shards(geometry(family), coord)
            assert {shard.name: list(shard.shape) for shard in shards} == rank["shapes"], item["case"]
            assert {shard.name for shard in shards if shard.dtype} <= set(rank["float32"])
