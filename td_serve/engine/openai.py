"""The OpenAI API, by vLLM's own serving classes, on engines that are elsewhere.

`OpenAIFrontend` takes decoded JSON bodies and gives replies: a JSON object with a status, or a
stream of server-sent events. It knows no HTTP server. Errors have OpenAI's shape.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
import pydantic
from starlette.datastructures import State
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from td_serve.config import EngineConfig, FrontendConfig
from td_serve.engine.arguments import structured_outputs
from td_serve.engine.cutting import take_out
from td_serve.engine.remote import ORIGIN_ARG, RemoteEngine, Serve
from td_serve.engine.versions import check_vllm
from td_serve.errors import BadRequest, RequestError, TooLarge
from td_serve.replies import JsonReply, Reply, StreamReply, error_reply
from td_serve.types import Origin

_ADDRESSES_OF_MEMORY = ("kv_transfer_params", "ec_transfer_params")
_OF_THE_MODEL = (
    "tokenizer",
    "tokenizer_mode",
    "tokenizer_revision",
    "trust_remote_code",
    "revision",
    "config_format",
    "hf_config_path",
    "hf_overrides",
)
"""Engine arguments that say how the model's files are read, here as in the engines."""
_CHARACTERS_A_TOKEN = 64
"""More than any tokenizer needs for ordinary text."""
_ERROR_EVENT = 'data: {"error"'


class OpenAIFrontend:
    """Chat and text completions for one model. Make it with `start`."""

    chat_parameters = frozenset(ChatCompletionRequest.model_fields)

    def __init__(self, state: State, engine: RemoteEngine, frontend: FrontendConfig) -> None:
        self._max_choices = frontend.max_choices
        self._separator_as = frontend.separator_as
        self._chat = state.openai_serving_chat
        self._completion = state.openai_serving_completion
        self._models = state.openai_serving_models
        self._engine = engine

    @classmethod
    async def start(
        cls,
        model: str,
        engine: EngineConfig,
        frontend: FrontendConfig,
        served_name: str,
        serve: Serve,
    ) -> OpenAIFrontend:
        """Load the model's tokenizer and templates, and send requests to `serve`.

        `model` is a local directory or hub id, `served_name` what clients call it.
        """
        check_vllm()
        args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
        args.model = model
        args.served_model_name = [served_name]
        args.chat_template = frontend.chat_template
        args.tool_call_parser = frontend.tool_call_parser
        args.structured_outputs_config.reasoning_parser = frontend.reasoning_parser or ""
        args.enable_auto_tool_choice = frontend.enable_auto_tool_choice
        args.enable_prompt_tokens_details = True
        config = AsyncEngineArgs(
            model=model,
            dtype=engine.dtype,
            max_model_len=engine.max_model_len,
            block_size=engine.block_size,
            enforce_eager=True,
            structured_outputs_config=structured_outputs(engine),
            **{name: engine.extra[name] for name in _OF_THE_MODEL if name in engine.extra},
        ).create_engine_config()
        remote = RemoteEngine(config, serve)
        state = State()
        await init_app_state(remote, state, args, supported_tasks=("generate",))
        return cls(state, remote, frontend)

    async def chat(self, body: dict[str, Any], origin: Origin) -> Reply:
        """`POST /v1/chat/completions`."""
        return await self._answer(
            ChatCompletionRequest, self._chat.create_chat_completion, body, origin
        )

    async def complete(self, body: dict[str, Any], origin: Origin) -> Reply:
        """`POST /v1/completions`."""
        return await self._answer(
            CompletionRequest, self._completion.create_completion, body, origin
        )

    async def models(self) -> JsonReply:
        """`GET /v1/models`."""
        models = await self._models.show_available_models()
        return JsonReply(HTTPStatus.OK, models.model_dump())

    def close(self) -> None:
        self._engine.shutdown()

    async def _answer(self, kind: Any, create: Any, body: dict[str, Any], origin: Origin) -> Reply:
        try:
            request = _decode(kind, body, origin, self._separator_as)
            _check_size(request, body, self._max_choices, self._engine.model_config.max_model_len)
            answer = await create(request, None)
        except RequestError as error:
            return error_reply(error)
        except GracefulHTTPError as error:
            if isinstance(error.__cause__, RequestError):
                return error_reply(error.__cause__)
            answer = create_error_response(error)
        except pydantic.ValidationError as error:
            return error_reply(_first_fault(error))
        except Exception as error:  # noqa: BLE001 - vLLM maps what it raises to statuses itself
            answer = create_error_response(error)
        if isinstance(answer, ErrorResponse):
            return JsonReply(answer.error.code, answer.model_dump())
        if isinstance(answer, AsyncGenerator):
            return await _before_first_byte(answer)
        return JsonReply(HTTPStatus.OK, answer.model_dump())


def _decode(kind: Any, body: dict[str, Any], origin: Origin, separator_as: str) -> Any:
    """A vLLM request out of a body. Raises BadRequest, pydantic.ValidationError."""
    extra = body.get("vllm_xargs")
    for name in (*_ADDRESSES_OF_MEMORY, ORIGIN_ARG):
        if body.get(name) is not None:
            raise BadRequest(f"{name}: not accepted from clients", field=name)
        if isinstance(extra, Mapping) and name in extra:
            raise BadRequest(f"vllm_xargs.{name}: not accepted from clients", field="vllm_xargs")
    body, texts = take_out(body, separator_as)
    request = kind.model_validate(body)
    if request.use_beam_search:
        raise BadRequest("use_beam_search: not served", field="use_beam_search")
    if origin.membership is not None:
        _check_one_prompt(body.get("prompt"))
        if request.truncate_prompt_tokens is None:  # or what is left of them is not known
            origin = msgspec.structs.replace(origin, texts=texts)
    if origin != Origin():
        request.vllm_xargs = {
            **(request.vllm_xargs or {}),
            ORIGIN_ARG: msgspec.json.encode(origin).decode(),
        }
    return request


def _check_size(request: Any, body: dict[str, Any], max_choices: int, window: int) -> None:
    """Refuse what would keep everybody else waiting. Raises BadRequest, TooLarge."""
    if (request.n or 1) > max_choices:
        raise BadRequest(f"n: {request.n}, expected at most {max_choices}", field="n")
    if request.truncate_prompt_tokens is None:
        return  # vLLM refuses by length before it tokenises
    most = window * _CHARACTERS_A_TOKEN
    characters = _characters(body.get("prompt")) + _characters(body.get("messages"))
    if characters > most:
        raise TooLarge(
            f"truncate_prompt_tokens: the prompt has {characters} characters before it is cut, "
            f"expected at most {most}",
            field="truncate_prompt_tokens",
        )


def _characters(text: object) -> int:
    """How much text there is in a prompt or in messages, at any depth."""
    if isinstance(text, str):
        return len(text)
    if isinstance(text, Mapping):
        return sum(map(_characters, text.values()))
    if isinstance(text, list):
        return sum(map(_characters, text))
    return 0


def _check_one_prompt(prompt: object) -> None:
    """A member of a round speaks once. A list of token ids is one prompt. Raises BadRequest."""
    is_tokens = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    if isinstance(prompt, list) and not is_tokens and len(prompt) != 1:
        raise BadRequest(
            f"prompt: {len(prompt)} prompts, expected one for a member of a round", field="prompt"
        )


def _first_fault(error: pydantic.ValidationError) -> BadRequest:
    fault = error.errors()[0]
    field = ".".join(str(part) for part in fault["loc"]) or None
    message = fault["msg"].removeprefix("Value error, ")
    return BadRequest(f"{field}: {message}" if field else message, field=field)


async def _before_first_byte(events: AsyncGenerator[str, None]) -> Reply:
    """Wait for the first event, so that an error before it still gets its HTTP status."""
    try:
        first = await anext(events)
    except StopAsyncIteration:
        return StreamReply(_replay([], events))
    if first.startswith(_ERROR_EVENT):
        await events.aclose()
        body = json.loads(first.removeprefix("data: "))
        return JsonReply(int(body["error"]["code"]), body)
    return StreamReply(_replay([first], events))


async def _replay(first: list[str], rest: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with contextlib.aclosing(rest):
        for event in first:
            yield event
        async for event in rest:
            yield event
