"""Exports from four ranks of several layouts, in one launch, read back by safetensors itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.distributed.export_worker import LAYOUTS, SIZE
from tests.distributed.publish_worker import Case
from tests.distributed.test_publish import REPO, free_ports
from tests.shard_reference import Tensors, first_difference, random_model


def run_ranks(directory: Path) -> None:
    [port] = free_ports(1)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPO)}
    ranks = []
    try:
        for rank in range(SIZE):
            command = [
                sys.executable,
                "-m",
                "tests.distributed.export_worker",
                str(rank),
                str(directory),
                str(port),
            ]
            ranks.append(subprocess.Popen(command, cwd=REPO, env=environment))
        assert [process.wait(timeout=150) for process in ranks] == [0] * SIZE
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def read_directory(directory: Path) -> Tensors:
    tensors: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def test_export(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"torch_dtype": "float16", "vocab_size": 101}))
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"the old weights must not be copied")
    run_ranks(tmp_path)
    for layout in LAYOUTS:
        case = Case({**layout, "ports": []})
        model = random_model(case.geometry, seed=3)
        for dtype in (torch.float32, torch.bfloat16):
            directory = tmp_path / f"{case.name}-{dtype.itemsize}"
            expected = {name: tensor.to(dtype) for name, tensor in model.items()}
            assert first_difference(read_directory(directory), expected) == "", directory.name
            config = json.loads((directory / "config.json").read_text())
            assert config == {"vocab_size": 101, "dtype": str(dtype).removeprefix("torch.")}
            assert (directory / "tokenizer.json").exists()
        index = json.loads((tmp_path / f"{case.name}-4" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == model.keys()
        assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in model.values())
    assert not list(tmp_path.glob("*.partial"))
