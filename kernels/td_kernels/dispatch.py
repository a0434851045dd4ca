"""Which of its implementations an operation runs."""

from __future__ import annotations

import os

import torch


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether this tensor is Triton's: on CUDA; anywhere, where Triton interprets its kernels
    (TRITON_INTERPRET=1), which is how they are tested without a GPU."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
