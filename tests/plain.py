"""Plain vLLM engines in the tests' own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_kept: list[Any] = []


def plain_engine(model: str | Path, **arguments: Any) -> Any:
    """A `vllm.LLM`, eager, float32 unless `arguments` say otherwise. It lives as long as we do.

    All engines of one process share what vLLM calls its parallel state: the first that is collected
    takes it from the others.
    """
    from vllm import LLM

    _kept.append(
        LLM(
            model=str(model),
            block_size=32,
            enforce_eager=True,
            **{
                "dtype": "float32",
                "max_model_len": 4096,
                "kv_cache_memory_bytes": 2**25,
                **arguments,
            },
        )
    )
    return _kept[-1]
