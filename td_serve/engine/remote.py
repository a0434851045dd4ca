"""vLLM's engine, seen from its OpenAI layer, when the engines are elsewhere.

`EngineClient` is vLLM's own seam between its API servers and its engines. Ours hands each request
to a `Serve` function (in the end: prefill on one replica, decode on another) and gives back what
comes, so that chat templates, tools, structured output, log-probabilities, streaming and usage are
vLLM's own code, unchanged.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any, Never

import msgspec
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.exceptions import GracefulHTTPError
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.v1.engine.input_processor import InputProcessor

from td_serve.engine.codec import encode_sampling, to_output
from td_serve.engine.cutting import Cutter
from td_serve.engine.heads import neutral_head
from td_serve.errors import BadRequest, RequestError
from td_serve.tenants import salt
from td_serve.types import Delta, GenerateRequest, Origin, RequestId

Serve = Callable[[GenerateRequest], AsyncGenerator[Delta, None]]

ORIGIN_ARG = "td_origin"
"""Key of the sampling parameters' extra arguments under which a request's origin travels from our
ingress through vLLM's OpenAI layer to here. Clients cannot set it: the ingress refuses it."""


class RemoteEngine(EngineClient):
    """An EngineClient without an engine: requests go to `serve`.

    Text generation only. What would act on an engine (sleep, adapters, weights) is refused.
    """

    def __init__(self, vllm_config: VllmConfig, serve: Serve) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self._serve = serve
        tokenizer = self.renderer.get_tokenizer()
        self._head = neutral_head(tokenizer)
        self._cutter = Cutter(tokenizer)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: Any = None,
        priority: int = 0,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        **_unused: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Serve a rendered prompt. Errors come as GracefulHTTPError, with a status."""
        try:
            request = await self._request(prompt, sampling_params, request_id, lora_request)
            request = msgspec.structs.replace(
                request,
                priority=priority,
                reasoning_ended=reasoning_ended,
                reasoning_parser_kwargs=reasoning_parser_kwargs,
            )
            async with contextlib.aclosing(self._serve(request)) as deltas:
                async for delta in deltas:
                    yield to_output(delta, request)
        except RequestError as error:
            raise GracefulHTTPError(error.message, error.status) from error

    async def _request(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, lora_request: Any
    ) -> GenerateRequest:
        """What an engine is asked. Raises BadRequest where it would refuse."""
        if lora_request is not None:
            raise BadRequest("model: LoRA adapters are not served", field="model")
        plain = self._tokens(prompt)
        params = sampling_params.clone()
        # What an engine would refuse is refused here, before anything is prefilled for it.
        params.verify(
            self.model_config,
            self.vllm_config.speculative_config,
            self.vllm_config.structured_outputs_config,
            self.renderer.tokenizer,
        )
        extra = dict(params.extra_args or {})
        packed = extra.pop(ORIGIN_ARG, None)
        origin = Origin() if packed is None else msgspec.json.decode(packed, type=Origin)
        params.extra_args = extra or None
        token_ids, cuts = await self._cut(plain, prompt, origin.texts, params)
        own_salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        return GenerateRequest(
            # A client may choose `request_id`, even one that is in use: ours must be its own.
            request_id=RequestId(f"{request_id}-{uuid.uuid4().hex[:16]}"),
            prompt_token_ids=token_ids,
            sampling=encode_sampling(params),
            n=params.n,
            # With a prompt read from elsewhere, vLLM has no logits of it to report.
            hand_over=params.prompt_logprobs is None,
            cache_salt=salt(origin.tenant, own_salt),
            membership=origin.membership,
            conversation=origin.conversation,
            cuts=cuts,
            head=self._head if cuts or origin.membership is not None else [],
        )

    def _tokens(self, prompt: Any) -> list[int]:
        """A rendered prompt's tokens. Raises BadRequest where no engine would take them."""
        parts = extract_prompt_components(self.model_config, prompt)
        if parts.token_ids is None:
            raise BadRequest("only text prompts are served (no embeddings)", field="prompt")
        if isinstance(prompt, Mapping) and prompt.get("mm_placeholders"):
            raise BadRequest("only text prompts are served (no images or audio)", field="messages")
        if not parts.token_ids:
            raise BadRequest("prompt: empty, expected at least one token", field="prompt")
        vocabulary = self.model_config.get_vocab_size()
        if (highest := max(parts.token_ids)) >= vocabulary:
            raise BadRequest(
                f"prompt: token {highest}, expected less than {vocabulary}", field="prompt"
            )
        return list(parts.token_ids)

    async def _cut(
        self, plain: list[int], prompt: Any, texts: list[list[str]], params: SamplingParams
    ) -> tuple[list[int], list[int]]:
        """The prompt's tokens in segments, where it was sent in some and there is room, and the
        cuts; else as they are.

        Mutates `params`: an answer that may fill the window still does just that.
        """
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else None
        if not texts or not isinstance(text, str):
            return plain, []
        window = self.model_config.max_model_len
        wanted = params.max_tokens or 1
        fills = len(plain) + wanted == window
        tokens, cuts = await self._cutter.cut(plain, text, texts)
        if len(tokens) + (1 if fills else wanted) > window:
            return plain, []
        if fills:
            params.max_tokens = window - len(tokens)
        return tokens, cuts

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        return False

    @property
    def dead_error(self) -> BaseException:
        return RuntimeError("no engine here")

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Nothing to do: requests are aborted by closing their generator."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """Nothing to log: engines log for themselves."""

    async def check_health(self) -> None:
        """Always healthy: the replicas answer for themselves."""

    def shutdown(self, timeout: float | None = None) -> None:
        self._cutter.close()
        self.renderer.shutdown()

    def encode(self, *args: Any, **kwargs: Any) -> Never:
        raise NotImplementedError("pooling is not served")

    def _refuse(self, *args: Any, **kwargs: Any) -> Never:
        raise NotImplementedError("this acts on an engine, and there is none in this process")

    notify_kv_transfer_request_rejected = _refuse
    start_profile = _refuse
    stop_profile = _refuse
    reset_mm_cache = _refuse
    reset_encoder_cache = _refuse
    reset_prefix_cache = _refuse
    sleep = _refuse
    wake_up = _refuse
    is_sleeping = _refuse
    release_kv_cache_memory = _refuse
    add_lora = _refuse
    pause_generation = _refuse
    resume_generation = _refuse
    is_paused = _refuse
