"""The ranks of the export test, through a list of layouts; DIRECTORY/port says where they meet."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from asyncrl.weights.export import write_hf
from asyncrl.weights.wire import WeightUpdateError
from tests.distributed.forked import fork_roles
from tests.distributed.publish_worker import Case, trainer_chunks

SIZE = 4
LAYOUTS = [
    {"name": "tp2-pp2", "tp": 2, "pp": 2, "family": "llama"},
    {"name": "pp2-vpp2-dp2", "pp": 2, "vpp": 2, "dp": 2, "family": "qwen2"},
    {"name": "tp4-fewer-kv-heads", "tp": 4, "family": "qwen3", "geometry": {"num_kv_heads": 2}},
]


def main(rank: int, directory: Path) -> None:
    port = int((directory / "port").read_text())
    timeout = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, SIZE, rank == 0, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timeout)
    for layout in LAYOUTS:
        case = Case({**layout, "ports": []})
        shards, tensors = trainer_chunks(case, rank, version=3)
        for dtype, max_file_bytes in ((torch.float32, 20_000), (torch.bfloat16, 1 << 30)):
            target = directory / f"{case.name}-{dtype.itemsize}"
            write_hf(target, directory / "source", case.geometry, shards, tensors, dtype, max_file_bytes)
    try:
        write_hf(target, directory / "source", case.geometry, shards, tensors, torch.float32)
    except WeightUpdateError as error:
        assert "exists already" in str(error)
    else:
        raise AssertionError("an export overwrote a directory")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    into = Path(sys.argv[1])
    fork_roles({f"rank{rank}": partial(main, rank, into) for rank in range(SIZE)}, into)
