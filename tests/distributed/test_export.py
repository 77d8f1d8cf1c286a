"""Exports from four ranks of several layouts, in one launch, read back by safetensors itself."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.distributed.export_worker import LAYOUTS
from tests.distributed.forked import run_launcher
from tests.distributed.publish_worker import Case
from tests.distributed.test_publish import reserved_ports
from tests.shard_reference import Tensors, first_difference, random_model


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
    with reserved_ports(1) as [port]:
        (tmp_path / "port").write_text(str(port))
        run_launcher("tests.distributed.export_worker", tmp_path, timeout_s=150)
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
