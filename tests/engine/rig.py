"""Real engines for tests of conversations: small, seeded, and a plain one to compare with."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import psutil
from vllm import SamplingParams

from td_serve.config import ConversationConfig, EngineConfig, NixlConfig
from td_serve.conversations import key
from td_serve.engine.codec import greedy_sampling
from td_serve.types import ConversationKey, GenerateRequest, RequestId
from tests.cluster.harness import is_engine
from tests.plain import plain_engine

BLOCK = 32
LAYERS = 4
THRESHOLD = 64
ENGINE = EngineConfig(
    dtype="float32",
    max_model_len=2048,
    block_size=BLOCK,
    kv_cache_gib=1.0,
    enforce_eager=True,
    enable_prefix_caching=False,
    extra={"num_gpu_blocks_override": 72},  # 2,304 tokens
)
NIXL = NixlConfig(host="127.0.0.1", env={"UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "lo"})
CONVERSATIONS = ConversationConfig(
    kv_recompute_threshold=THRESHOLD, decoder_kv_blocks_ttl=60.0, read_patience_s=5.0
)

_numbers = itertools.count()


class Oracle:
    """What a plain engine answers; each question is asked once."""

    def __init__(self, model: Path) -> None:
        self._llm = plain_engine(model, max_model_len=2048)
        self._answers: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def answer(self, prompt: list[int], max_tokens: int = 8) -> list[int]:
        asked = (tuple(prompt), max_tokens)
        if asked not in self._answers:
            (output,) = self._llm.generate(
                {"prompt_token_ids": prompt},
                SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
                use_tqdm=False,
            )
            self._answers[asked] = list(output.outputs[0].token_ids)
        return self._answers[asked]


def make_request(
    prompt: list[int], conversation: ConversationKey | None, max_tokens: int = 8
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(f"turn-{next(_numbers)}"),
        prompt_token_ids=prompt,
        sampling=greedy_sampling(max_tokens),
        conversation=conversation,
    )


def some_tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40_000), k=count)


def new_conversation() -> ConversationKey:
    return key("", f"conversation-{next(_numbers)}")


def engine_processes() -> set[psutil.Process]:
    """The engines' processes under this one."""
    return {process for process in psutil.Process().children(recursive=True) if is_engine(process)}
