"""vLLM's request and output objects, to and from our wire structs.

Sampling parameters are a msgspec struct in vLLM and travel in its own encoding. Outputs are plain
classes: what the OpenAI layer reads of them is written out field by field, so that nothing is
unpickled and a field that vLLM adds is not lost silently but simply not served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from td_serve.types import ChoiceDelta, Delta, GenerateRequest, TokenLogprob

_sampling_encoder = msgspec.msgpack.Encoder()
_sampling_decoder = msgspec.msgpack.Decoder(SamplingParams)


def encode_sampling(params: SamplingParams) -> bytes:
    return _sampling_encoder.encode(params)


def greedy_sampling(max_tokens: int) -> bytes:
    """Exactly `max_tokens` tokens, each the likeliest, in deltas: to measure and to compare."""
    return encode_sampling(
        SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
    )


def decode_sampling(data: bytes) -> SamplingParams:
    return _sampling_decoder.decode(data)


def to_delta(output: RequestOutput, *, cached_tokens: int, first: bool) -> Delta:
    """One engine output as a delta. `first` says that prompt log-probabilities may go along."""
    prompt = output.prompt_logprobs if first else None
    return Delta(
        choices=[_to_choice(choice) for choice in output.outputs],
        finished=output.finished,
        cached_tokens=cached_tokens,
        prompt_logprobs=None if prompt is None else [_to_optional(entry) for entry in prompt],
    )


def to_output(delta: Delta, request: GenerateRequest) -> RequestOutput:
    """A delta as the engine output that vLLM's OpenAI layer expects."""
    prompt = delta.prompt_logprobs
    return RequestOutput(
        request_id=request.request_id,
        prompt=None,
        prompt_token_ids=request.prompt_token_ids,
        prompt_logprobs=None
        if prompt is None
        else [None if entry is None else _from_candidates(entry) for entry in prompt],
        outputs=[
            CompletionOutput(
                index=choice.index,
                text=choice.text,
                token_ids=choice.token_ids,
                cumulative_logprob=choice.cumulative_logprob,
                logprobs=None
                if choice.logprobs is None
                else [_from_candidates(entry) for entry in choice.logprobs],
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for choice in delta.choices
        ],
        finished=delta.finished,
        num_cached_tokens=delta.cached_tokens,
    )


def _to_choice(choice: CompletionOutput) -> ChoiceDelta:
    return ChoiceDelta(
        index=choice.index,
        text=choice.text,
        token_ids=list(choice.token_ids),
        logprobs=None if choice.logprobs is None else [_to_candidates(e) for e in choice.logprobs],
        cumulative_logprob=choice.cumulative_logprob,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )


def _to_optional(entry: Mapping[int, Logprob] | None) -> list[TokenLogprob] | None:
    return None if entry is None else _to_candidates(entry)


def _to_candidates(entry: Mapping[int, Logprob]) -> list[TokenLogprob]:
    # The order is meaning: the sampled token comes first.
    return [
        TokenLogprob(token_id=token, logprob=one.logprob, rank=one.rank, text=one.decoded_token)
        for token, one in entry.items()
    ]


def _from_candidates(entry: Iterable[TokenLogprob]) -> dict[int, Logprob]:
    return {
        one.token_id: Logprob(logprob=one.logprob, rank=one.rank, decoded_token=one.text)
        for one in entry
    }
