"""Each property of a kernel is a test of whatever runs it here: torch on a CPU; Triton's
interpreter in a process of its own (`test_interpreted.py`); Triton on a GPU, where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from td_kernels import chunks, tiles
from td_kernels.dispatch import uses_triton

IS_INTERPRETED = uses_triton(torch.empty(0))

# The interpreter is slow: a program takes milliseconds.
hypothesis.settings.register_profile(
    "kernels", deadline=None, max_examples=30 if IS_INTERPRETED else 80, database=None
)

HAS_GPU = torch.cuda.is_available() and not IS_INTERPRETED


@pytest.fixture(
    scope="session",
    params=["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if HAS_GPU else [])],
)
def device(request: pytest.FixtureRequest) -> str:
    """Where tensors are."""
    return str(request.param)


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """Small tensors are worked on in several pieces, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "NUMBERS", 16)
        patch.setattr(chunks, "CHUNK_BYTES", 64)
        yield
