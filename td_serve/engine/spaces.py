"""Which KV an engine may take over: what the same model has computed, as exactly.

Two engines have one space if and only if each could have computed the other's KV.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_WHENCE = ("_name_or_path", "transformers_version")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_SAMPLES = 64
_SAMPLE_BYTES = 64 * 2**10


def space_of(vllm_config: Any) -> str:
    """The space of a worker's engine, a hex digest: of its model's configuration, dtype, and
    quantisation, of samples throughout its weights' files, and of which ranks it has the heads.

    Where the model was made plays no part, so that machines share what is theirs.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    found = hashlib.blake2b(digest_size=16)
    config = {
        name: value for name, value in model.hf_config.to_dict().items() if name not in _WHENCE
    }
    weights = sorted(path for path in Path(model.model).glob("*") if path.suffix in _WEIGHTS)
    parts = [
        json.dumps(config, sort_keys=True, default=str),
        str(model.dtype),
        str(model.quantization),
        str(vllm_config.cache_config.cache_dtype),
        f"{parallel.rank} of {parallel.tensor_parallel_size}",
        "" if weights else f"{model.model} {model.seed}",  # random ones, or loaded from elsewhere
    ]
    for part in parts:
        found.update(f"{len(part)}:{part}".encode())
    for path in weights:
        found.update(_sampled(path))
    return found.hexdigest()


def _sampled(path: Path) -> bytes:
    """A digest of a file's size and of pieces throughout it: weights that have been trained on
    differ nearly everywhere, and all of them would take long to read."""
    size = path.stat().st_size
    found = hashlib.blake2b(str(size).encode())
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(number * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            found.update(file.read(_SAMPLE_BYTES))
    return found.digest()
