"""A GGUF file rewritten as a directory that transformers and vLLM load.

The weights are stored in float32: de-quantised exactly, not rounded to bfloat16 on top of their
four bits, so that a float32 engine, transformers and the GGUF file itself agree. vLLM casts them to
the dtype it serves in. bfloat16 would halve SmolLM2's 538 MB and save nothing one could feel: of
3-5 s that an engine takes to start, loading is 0.13 s against 0.09 s (0.96 s when not in the page
cache; 2 cores, vLLM 0.32).
"""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

from td_serve.models.catalog import PackagedModel


def convert_gguf(model: PackagedModel, source: Path, into: Path) -> None:
    """Write `model`, whose weights are the GGUF file `source`, into the directory `into`.

    Writes config, generation config, weights (float32 safetensors), tokenizer and chat template;
    all but the two values noted below come from the GGUF file. Takes about 20 seconds and 2 GB of
    memory.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(**where)
        dense = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        # The weights are plain now; with the marker left on, they would be saved as quantised.
        if hasattr(dense.config, "quantization_config"):
            del dense.config.quantization_config
        dense.hf_quantizer = None
        dense.is_quantized = False

        dense.config.rms_norm_eps = model.rms_norm_eps
        tokenizer.model_max_length = model.positions
        dense.config._model_name_or_path = model.title
        dense.save_pretrained(into)
        tokenizer.save_pretrained(into)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars and advice: callers show their own progress.

    Not all of its bars heed its switch: what goes to stderr meanwhile is dropped. Failures raise.
    """
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
