"""Writing safetensors files one tensor at a time, so that no file has to fit into memory.

    names, shapes, dtypes of all tensors -> header of every file -> tensors in that order -> index

Layout of a file, from the format's specification: u64 little-endian header length; JSON header that maps a
name to {dtype, shape, data_offsets}, padded with spaces to a multiple of 8; the tensors' bytes back to back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

CODES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def split_files(specs: Sequence[TensorSpec], max_file_bytes: int) -> dict[str, list[TensorSpec]]:
    """File names and the tensors that each takes, in order; at least one tensor per file."""
    parts: list[list[TensorSpec]] = [[]]
    for spec in specs:
        used = sum(member.num_bytes for member in parts[-1])
        if parts[-1] and used + spec.num_bytes > max_file_bytes:
            parts.append([])
        parts[-1].append(spec)
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    total = len(parts)
    return {f"model-{idx + 1:05d}-of-{total:05d}.safetensors": part for idx, part in enumerate(parts)}


def write_index(directory: Path, files: Mapping[str, Sequence[TensorSpec]]) -> None:
    """Write `model.safetensors.index.json` where there is more than one file."""
    if len(files) == 1:
        return
    weight_map = {spec.name: file_name for file_name, specs in files.items() for spec in specs}
    total = sum(spec.num_bytes for specs in files.values() for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


class TensorFile:
    """An open file whose header names tensors that are still to come."""

    def __init__(self, handle: BinaryIO, specs: Sequence[TensorSpec]) -> None:
        self._handle = handle
        self._expected = list(specs)
        self._handle.write(_header(specs))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor; its name, shape and dtype must be those announced."""
        spec = self._expected.pop(0)
        if (name, tuple(tensor.shape), tensor.dtype) != (spec.name, spec.shape, spec.dtype):
            raise ValueError(f"{name} {tuple(tensor.shape)} {tensor.dtype} comes where {spec} was announced")
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        data.numpy().tofile(self._handle)

    @property
    def is_complete(self) -> bool:
        return not self._expected


@contextmanager
def tensor_file(path: Path, specs: Sequence[TensorSpec]) -> Iterator[TensorFile]:
    """Write all of ``specs`` to a file within the block."""
    with path.open("wb") as handle:
        file = TensorFile(handle, specs)
        yield file
        if not file.is_complete:
            raise ValueError(f"{path} lacks tensors that its header announces")


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        ends = [offset, offset + spec.num_bytes]
        entries[spec.name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
