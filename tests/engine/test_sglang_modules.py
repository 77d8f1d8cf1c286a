"""Names, shapes and dtypes of the layouts against real SGLang models of the families with experts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from asyncrl.weights.engine_layout import check_manifest, engine_shards
from tests.engine.conftest import REPO
from tests.shard_reference import geometry

CASES = [
    ["qwen3_moe", 1, 1],
    ["qwen3_moe", 4, 2],
    ["qwen3_moe", 8, 8],
    ["deepseek_v3", 4, 2],
    ["deepseek_v3", 2, 1],
    ["deepseek_v3_no_q_lora", 2, 2],
]


def test_layouts_are_those_of_real_models() -> None:
    command = [sys.executable, "-m", "tests.engine.sglang_modules_worker", json.dumps(CASES)]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "ignore"}
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environment, cwd=REPO, timeout=300, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [item["case"] for item in told] == CASES
    for item in told:
        family, tp, ep = item["case"]
        for rank, held in enumerate(item["ranks"]):
            shards = engine_shards(geometry(family), tp, rank, ep)
            check_manifest(shards, {name: tuple(shape) for name, (shape, _) in held.items()}, "engine")
            for shard in shards:
                assert held[shard.name][1] == (shard.dtype or "bfloat16"), shard.name
