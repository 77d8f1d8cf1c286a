"""From the trainer ranks' shards to a Hugging Face directory, one whole tensor at a time.

    layouts of all ranks -> owners of every rectangle (as for a publication, the files being the receiver)
    for each tensor in file order: owners send their rectangles -> rank 0 -> file

Rank 0 holds one whole tensor at a time and nobody holds a copy of the model. The directory appears under its
name only when it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from asyncrl.weights.collective import (
    collective_device,
    dtype_name,
    exchange_layouts,
    on_all_ranks,
)
from asyncrl.weights.geometry import ModelError, ModelGeometry
from asyncrl.weights.hf import CheckpointFiles
from asyncrl.weights.layout import Block, ShardLayout, hf_tensors, matrix_shape
from asyncrl.weights.plan import (
    Piece,
    RankLayout,
    assign_owners,
)
from asyncrl.weights.safetensors_file import CODES, TensorSpec, split_files, tensor_file, write_index

MAX_FILE_BYTES = 4 << 30
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "LICENSE*",
)
"""What is taken over from the directory that the model came from, beside its weights."""


def write_hf(
    directory: Path,
    source: Path,
    geometry: ModelGeometry,
    shards: Sequence[ShardLayout],
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Export the model; all ranks of the default group call this together with their own parameters.

    ``source`` is the Hugging Face directory that gives the configuration and the tokenizer; ``dtype`` is that
    of the files, float32 or bfloat16. Returns on every rank when the directory is complete.

    Raises:
        ModelError: the dtype is unknown, or the ranks together lack a tensor.
        WeightUpdateError: on every rank, where the directory exists already.
    """
    if dtype not in CODES:
        raise ModelError(f"weights are exported as float32 or bfloat16, not {dtype}")
    partial = on_all_ranks(lambda: _new_directory(directory) if dist.get_rank() == 0 else directory)
    shapes = hf_tensors(geometry)
    specs = [TensorSpec(name, shape, dtype) for name, shape in shapes.items()]
    pieces = _pieces_by_tensor(specs, shards, tensors)
    own = [tensors[shard.name].detach() for shard in shards]
    if dist.get_rank() == 0:
        _copy_companions(source, partial, dtype)
        _write_files(partial, split_files(specs, max_file_bytes), pieces, own)
        _check_files(partial, specs)
        partial.rename(directory)
    else:
        for spec in specs:
            for piece in pieces[spec.name]:
                if piece.source.rank == dist.get_rank():
                    dist.send(_rectangle(own, piece, dtype), dst=0)
    dist.barrier()


def _new_directory(directory: Path) -> Path:
    """Make the directory that is filled and then renamed."""
    if directory.exists():
        raise ModelError(f"{directory} exists already; an export does not overwrite")
    partial = directory.with_name(f"{directory.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def _pieces_by_tensor(
    specs: Sequence[TensorSpec], shards: Sequence[ShardLayout], tensors: Mapping[str, torch.Tensor]
) -> dict[str, list[Piece]]:
    """Who gives which rectangle of each tensor, the same on all ranks, in file order."""
    senders = exchange_layouts(shards, [tensors[shard.name] for shard in shards])
    whole = tuple(
        ShardLayout(spec.name, spec.shape, (Block(spec.name, 0, 0, *matrix_shape(spec.shape)),))
        for spec in specs
    )
    files = RankLayout(whole, tuple(dtype_name(spec.dtype) for spec in specs))
    pieces: dict[str, list[Piece]] = {spec.name: [] for spec in specs}
    for piece in assign_owners(senders, [files], [0] * len(senders)):
        pieces[specs[piece.target.shard_idx].name].append(piece)
    return pieces


def _copy_companions(source: Path, target: Path, dtype: torch.dtype) -> None:
    for pattern in COMPANIONS:
        for path in sorted(source.glob(pattern)):
            shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype_name(dtype)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_files(
    directory: Path,
    files: Mapping[str, Sequence[TensorSpec]],
    pieces: Mapping[str, Sequence[Piece]],
    own: Sequence[torch.Tensor],
) -> None:
    for file_name, specs in files.items():
        with tensor_file(directory / file_name, specs) as file:
            for spec in specs:
                file.write(spec.name, _assemble(spec, pieces[spec.name], own))
    write_index(directory, files)


def _assemble(spec: TensorSpec, pieces: Sequence[Piece], own: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole tensor, from rank 0's own rectangles and those that the others send."""
    whole = torch.empty(matrix_shape(spec.shape), dtype=spec.dtype)
    for piece in pieces:
        if piece.source.rank == 0:
            part = _rectangle(own, piece, spec.dtype)
        else:
            part = torch.empty(piece.rows, piece.cols, dtype=spec.dtype, device=collective_device())
            dist.recv(part, src=piece.source.rank)
        row, col = piece.target.row, piece.target.col
        whole[row : row + piece.rows, col : col + piece.cols] = part
    return whole.view(spec.shape)


def _rectangle(own: Sequence[torch.Tensor], piece: Piece, dtype: torch.dtype) -> torch.Tensor:
    """The rectangle that this rank gives, contiguous, [rows, cols]."""
    place = piece.source
    matrix = own[place.shard_idx]
    matrix = matrix.view(matrix_shape(matrix.shape))
    part = matrix[place.row : place.row + piece.rows, place.col : place.col + piece.cols]
    return part.to(device=collective_device(), dtype=dtype).contiguous()


def _check_files(directory: Path, specs: Sequence[TensorSpec]) -> None:
    """Read the headers back: every tensor is there, in its shape."""
    files = CheckpointFiles(directory)
    for spec in specs:
        shape = files.shape(spec.name)
        if shape != spec.shape:
            raise ModelError(f"{directory}: {spec.name} was written as {spec.shape} and reads as {shape}")
