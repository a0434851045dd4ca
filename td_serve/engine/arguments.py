"""What vLLM is started with: our configuration in its words."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Literal

from vllm.config import KVTransferConfig
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from td_serve.config import ConversationConfig, EngineConfig, NixlConfig
from td_serve.engine.connector import LEASE_TTL, LEASES_AT, PROGRESS_DELAY, STARTED_BY
from td_serve.engine.restoring import STORE_BELOW, STORE_BYTES, STORE_CODECS
from td_serve.errors import ConfigError
from td_serve.types import ReplicaId

Role = Literal["prefill", "decode"]

_FOR_TIERS = ("lmcache", "aiofiles", "redis")


def engine_arguments(
    role: Role, replica: ReplicaId, model: str, engine: EngineConfig, transfer: Mapping[str, Any]
) -> AsyncEngineArgs:
    """An engine's arguments.

    Raises ConfigError when `engine.extra` names one that vLLM lacks, or that stands elsewhere.
    """
    ours: dict[str, Any] = {
        "model": model,
        "dtype": engine.dtype,
        "block_size": engine.block_size,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "enforce_eager": engine.enforce_eager,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "seed": engine.seed,
        "enable_log_requests": False,
        "structured_outputs_config": structured_outputs(engine),
        "kv_transfer_config": KVTransferConfig(engine_id=replica, **transfer),
    }
    if role == "prefill":
        ours["worker_extension_cls"] = "td_serve.engine.worker.PassWorker"
    optional = {
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "kv_cache_memory_bytes": None
        if engine.kv_cache_gib is None
        else int(engine.kv_cache_gib * 2**30),
    }
    ours |= {name: value for name, value in optional.items() if value is not None}
    for name in engine.extra:
        if name not in AsyncEngineArgs.__dataclass_fields__:
            raise ConfigError(f"engine.extra.{name}: vLLM has no engine argument of that name")
        if name in ours:
            raise ConfigError(f"engine.extra.{name}: td_serve gives it itself, expected another")
    return AsyncEngineArgs(**ours, **engine.extra)


def structured_outputs(engine: EngineConfig) -> StructuredOutputsConfig:
    """How grammars are checked at the ingress and compiled in the engines: the same way.

    By itself vLLM chooses a compiler for each request, but an engine only ever has the first one
    that it needed: whether it takes a grammar would then depend on who came before.
    """
    return StructuredOutputsConfig(backend=engine.grammar_backend)


def transfer_arguments(
    role: Role,
    engine: EngineConfig,
    nixl: NixlConfig,
    conversations: ConversationConfig,
    leases_at: str | None,
) -> dict[str, Any]:
    """vLLM's KV transfer configuration for one role, without the engine's id.

    `leases_at` is where a decode engine answers for its leases; without it none is granted.
    Raises ConfigError where something is wanted that is not installed.
    """
    if engine.pass_store_below and any(find_spec(name) is None for name in _FOR_TIERS):
        raise ConfigError(
            f"engine.pass_store_below: {len(engine.pass_store_below)} places, expected none unless "
            "LMCache is installed: `make lmcache`"
        )
    extra: dict[str, Any] = {
        "backends": [nixl.backend],
        "kv_lease_duration": nixl.lease_s,
        PROGRESS_DELAY: nixl.progress_delay_us,
        STARTED_BY: os.getpid(),
    }
    if leases_at is not None:
        extra |= {LEASES_AT: leases_at, LEASE_TTL: conversations.decoder_kv_blocks_ttl}
    if role == "prefill":
        # Only the reader needs vLLM's switch: on a decode engine it would pin finished requests
        # vLLM's own way, beside the leases.
        extra |= {
            "bidirectional_kv_xfer": conversations.bidirectional_kv_xfer,
            "kv_recompute_threshold": 0,  # each request says its own (`reads.LEAST`)
        }
    common = {"kv_role": "kv_both", "kv_buffer_device": current_platform.device_type}
    nixl_part = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "td_serve.engine.connector",
        "kv_connector_extra_config": extra,
        **common,
    }
    if role == "decode":
        # A read that fails is retried from the prefill on, by whoever dispatched it.
        return {**nixl_part, "kv_load_failure_policy": "fail"}
    rounds_part = {
        "kv_connector": "RoundConnector",
        "kv_connector_module_path": "td_serve.engine.restoring",
        "kv_connector_extra_config": {
            STORE_BYTES: int(engine.pass_store_gib * 2**30),
            STORE_CODECS: [engine.pass_store_diffs, engine.pass_store_private],
            STORE_BELOW: [engine.pass_store_below, int(engine.pass_store_folder_gib * 2**30)],
        },
        **common,
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [nixl_part, rounds_part]},
        # What could not be read is computed.
        "kv_load_failure_policy": "recompute",
        **common,
    }


@contextlib.contextmanager
def environment(env: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started within."""
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
