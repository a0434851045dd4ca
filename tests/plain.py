"""Plain vLLM engines in the tests' own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_kept: list[Any] = []


def plain_engine(model: str | Path, **arguments: Any) -> Any:
    """A `vllm.LLM`, float32 and eager, which lives until the process ends.

    All engines of one process share what vLLM calls its parallel state: the first that is collected
    takes it from the others.
    """
    from vllm import LLM

    _kept.append(
        LLM(
            model=str(model),
            dtype="float32",
            block_size=32,
            enforce_eager=True,
            **{"max_model_len": 4096, "kv_cache_memory_bytes": 2**25, **arguments},
        )
    )
    return _kept[-1]
