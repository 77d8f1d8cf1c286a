"""The copies between a bucket and a rank's parameters, as `asyncrl._C` runs them; on either side."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

import asyncrl._C as _C
from asyncrl.weights.wire import WeightUpdateError


class BucketCopies:
    """The copies between one bucket and one rank's parameters, run on the device that holds them.

    ``parameters`` stand for all lists of tensors of the same shapes, dtypes and device.
    ``table`` has ten int64 fields per segment, as csrc/reshard/index.h's Segment orders them;
    ``block_scales`` five per segment that quantises, as BlockScales orders them.
    """

    def __init__(
        self,
        table: array[int],
        parameters: Sequence[torch.Tensor],
        num_bytes: int,
        num_digests: int,
        block_scales: array[int] | None = None,
    ) -> None:
        sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        program = _C.CopyProgram(table, sizes, num_bytes, num_digests, block_scales)
        on_cuda = bool(parameters) and parameters[0].is_cuda
        if on_cuda and not _C.with_cuda:
            raise WeightUpdateError("asyncrl._C was built without CUDA; rebuild it where nvcc is found")
        self._program = _C.CudaProgram(program) if on_cuda else program
        self._on_cuda = on_cuda

    def pack(self, parameters: Sequence[torch.Tensor], space: torch.Tensor, digests: torch.Tensor) -> None:
        """Fill a bucket, uint8, and add to the digests, int64."""
        self._program.pack(*self._arguments(parameters, space, digests))

    def unpack(self, parameters: Sequence[torch.Tensor], space: torch.Tensor, digests: torch.Tensor) -> None:
        """Write the parameters from a bucket, uint8, and add to the digests, int64."""
        self._program.unpack(*self._arguments(parameters, space, digests))

    def _arguments(
        self, parameters: Sequence[torch.Tensor], space: torch.Tensor, digests: torch.Tensor
    ) -> tuple[Any, ...]:
        # Addresses are read every time: a parameter's storage may have been replaced since.
        addresses = [parameter.data_ptr() for parameter in parameters]
        stream = (torch.cuda.current_stream().cuda_stream,) if self._on_cuda else ()
        return addresses, space.data_ptr(), digests.data_ptr(), *stream
