"""vLLM's own generate, with its errors translated to ours.

An engine ends a request whose KV could not be loaded and one whose grammar could not be compiled,
or admits nothing, with the same bare "error". The grammar is compiled once more then, to tell which
it was.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

from td_serve.errors import BadRequest, EngineFailure, RequestError, Unavailable
from td_serve.types import GenerateRequest, ReplicaId

_BACKENDS: dict[str, Any] = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend}


async def generate(
    llm: AsyncLLM, replica: ReplicaId, request: GenerateRequest, params: SamplingParams
) -> AsyncGenerator[RequestOutput, None]:
    """The engine's outputs. Raises BadRequest, EngineFailure or Unavailable."""
    prompt = TokensPrompt(prompt_token_ids=request.prompt_token_ids)
    if request.cache_salt is not None:
        prompt["cache_salt"] = request.cache_salt
    outputs = llm.generate(
        prompt,
        params,
        request.request_id,
        priority=request.priority,
        reasoning_ended=request.reasoning_ended,
        reasoning_parser_kwargs=request.reasoning_parser_kwargs,
    )
    try:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if any(choice.finish_reason == "error" for choice in output.outputs):
                    fault = await asyncio.to_thread(_grammar_fault, llm, params)
                    if fault is not None:
                        raise BadRequest(f"structured_outputs: {fault}", field="structured_outputs")
                    raise Unavailable(
                        f"request {request.request_id}: {replica} could not load its KV"
                    )
                yield output
    except RequestError:
        raise
    except EngineDeadError as error:
        raise Unavailable(f"{replica}: the engine has died") from error
    except (VLLMClientError, ValueError) as error:
        raise BadRequest(str(error)) from error
    except GracefulHTTPError as error:
        raise Unavailable(f"{replica}: {error}") from error
    except Exception as error:
        raise EngineFailure(f"request {request.request_id}: {replica} failed: {error!r}") from error


def _grammar_fault(llm: AsyncLLM, params: SamplingParams) -> str | None:
    """What is wrong with the grammar that `params` ask for; None: nothing, or there is none."""
    wanted = params.structured_outputs
    if wanted is None or wanted.all_constraints_none():
        return None
    config = llm.vllm_config
    compiler = _BACKENDS[config.structured_outputs_config.backend](
        config, tokenizer=llm.get_tokenizer(), vocab_size=config.model_config.get_vocab_size()
    )
    try:
        grammar = compiler.compile_grammar(*get_structured_output_key(wanted))
    except Exception as error:  # noqa: BLE001 - whatever it is, the client's grammar caused it
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    allowed = compiler.allocate_token_bitmask(1)
    allowed.zero_()
    grammar.fill_bitmask(allowed, 0)
    return None if allowed.any() else "no text at all matches the grammar"
