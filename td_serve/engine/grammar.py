"""Why an engine refused a request's grammar, which it does not say.

An engine compiles the grammar of a structured output when the request is already under way, and
ends the request with the same bare "error" as one whose KV could not be loaded. Compiling the
grammar once more tells which it was; that is only done for requests that have failed.
"""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

_BACKENDS: dict[str, Any] = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend}


def grammar_fault(vllm_config: Any, tokenizer: Any, params: SamplingParams) -> str | None:
    """What is wrong with the grammar that `params` ask for; None: nothing, or there is none.

    Takes as long as compiling does.
    """
    wanted = params.structured_outputs
    if wanted is None or wanted.all_constraints_none():
        return None
    backend = _BACKENDS.get(wanted._backend or "xgrammar")
    if backend is None:
        return None
    compiler = backend(
        vllm_config, tokenizer=tokenizer, vocab_size=vllm_config.model_config.get_vocab_size()
    )
    try:
        compiler.compile_grammar(*get_structured_output_key(wanted))
    except Exception as error:  # noqa: BLE001 - whatever it is, the client's grammar caused it
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None
