"""Reading a Hugging Face checkpoint into local shards.

model.safetensors, or model.safetensors.index.json and its parts
    -> only the rectangles that this rank's layouts name (memory-mapped, nothing else is read)
    -> the rank's own parameters, cast to their dtype; rows that no block covers become zero
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from asyncrl.weights.geometry import ModelError
from asyncrl.weights.layout import Block, ShardLayout, matrix_shape

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class CheckpointFiles:
    """The tensors of a directory, opened lazily; rectangles of them are read through `read_block`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file_of = _locate_tensors(directory)
        self._open: dict[str, Any] = {}

    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Raises `ModelError` where the tensor is missing."""
        return tuple(self._slice_of(tensor).get_shape())

    def read_block(self, block: Block) -> torch.Tensor:
        """The block's elements, [rows, cols], in the file's dtype.

        Raises:
            ModelError: the tensor is missing, or smaller than the block.
        """
        piece = self._slice_of(block.tensor)
        shape = piece.get_shape()
        rows, cols = matrix_shape(shape)
        if block.row + block.rows > rows or block.col + block.cols > cols or len(shape) > 2:
            raise ModelError(
                f"{self._directory}: {block.tensor} has shape {tuple(shape)}, but rows up to"
                f" {block.row + block.rows} and columns up to {block.col + block.cols} are needed"
            )
        row_range = slice(block.row, block.row + block.rows)
        if len(shape) == 1:
            data = piece[row_range].unsqueeze(1)
        else:
            data = piece[row_range, block.col : block.col + block.cols]
        return torch.as_tensor(data)

    def _slice_of(self, tensor: str) -> Any:
        file_name = self._file_of.get(tensor)
        if file_name is None:
            raise ModelError(f"{self._directory}: the weights have no tensor {tensor}")
        if file_name not in self._open:
            path = self._directory / file_name
            try:
                self._open[file_name] = safe_open(path, framework="pt")
            except (FileNotFoundError, SafetensorError) as error:
                raise ModelError(f"{path}: not a readable safetensors file: {error}") from None
        return self._open[file_name].get_slice(tensor)


def read_shards(directory: Path, shards: Iterable[ShardLayout], tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill this rank's parameters from a checkpoint directory.

    ``tensors`` maps every shard's name to the parameter that takes it, of the shard's shape; values are cast
    to the parameter's dtype and copied in place.

    Raises:
        ModelError: no safetensors weights, a missing tensor, or a shape that does not fit.
    """
    files = CheckpointFiles(directory)
    with torch.no_grad():
        for shard in shards:
            target = tensors[shard.name]
            if tuple(target.shape) != shard.shape:
                raise ModelError(
                    f"{shard.name} has shape {tuple(target.shape)}, its layout says {shard.shape}"
                )
            matrix = target.view(shard.rows, shard.cols)
            if shard.num_padding:
                matrix.zero_()
            for block in shard.blocks:
                local(matrix, block).copy_(files.read_block(block))


def local(matrix: torch.Tensor, block: Block) -> torch.Tensor:
    """The view of a local parameter, seen as a matrix, that a block fills."""
    rows = slice(block.local_row, block.local_row + block.rows)
    return matrix[rows, block.local_col : block.local_col + block.cols]


def _locate_tensors(directory: Path) -> dict[str, str]:
    index = directory / INDEX_FILE
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return weight_map
    single = directory / SINGLE_FILE
    if not single.exists():
        raise ModelError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}; download the model's weights")
    try:
        with safe_open(single, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), SINGLE_FILE)
    except SafetensorError as error:
        raise ModelError(f"{single}: not a readable safetensors file: {error}") from None
