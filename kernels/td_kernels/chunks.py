"""How much of a tensor is worked on at once on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHUNK_BYTES = 2**19
"""Temporaries of this size stay in a core's second cache, and their memory is not asked of the
system anew. Measured on an AMD EPYC with 1 MiB of it, by `scripts/restore_bench.py`: from 2**18 to
all tokens at once it makes a tenth; where the allocator gives large pieces back to the system, all
at once takes twice as long."""


def chunks(rows: torch.Tensor, count: int | None = None) -> Iterator[slice]:
    """So many rows like these (None: these), a few at a time."""
    count = len(rows) if count is None else count
    step = max(1, CHUNK_BYTES // max(1, rows[:1].numel() * rows.element_size()))
    return (slice(first, min(first + step, count)) for first in range(0, count, step))
