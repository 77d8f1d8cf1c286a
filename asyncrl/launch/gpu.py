"""Whether this machine has a GPU, without torch where the answer is no.

Most processes of a run never compute: importing torch would cost each of them seconds and a quarter of a GiB.
"""

from __future__ import annotations

import ctypes

CUDA_DRIVER = "libcuda.so.1"


def has_gpu() -> bool:
    """True where torch can use CUDA; without the driver's library it cannot, and is not asked."""
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()
