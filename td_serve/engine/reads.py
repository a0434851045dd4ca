"""A prefill engine's reads of leased KV, by vLLM's pull connector, made safe.

vLLM's own connector reads what it is told to. What it does not do is done here, in subclasses:
a read that was not over when its lease's hold ended is thrown away and computed instead, and a
request that is scheduled anew (preempted, or its read failed) is not parked for a read that nobody
makes.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

DEADLINE = "td_deadline"
"""Key of a request's KV transfer parameters: until when (CLOCK_MONOTONIC of this machine, seconds)
the blocks that it names are sure to be kept."""

LEAST = "td_least"
"""Key of a request's KV transfer parameters: fewer tokens than these are computed, not read."""

READ = "td_read"
"""Key of what a request finishes with: its read, as `types.Read`."""

_HANDLED = "_remote_blocks_processed"
"""vLLM's own mark in the parameters: the request's one read has been made, or is not wanted."""


@dataclasses.dataclass
class _Reading:
    """A read, from its order on."""

    tokens: int
    bytes: int
    began: float
    seconds: float = 0.0
    failed: bool = False


class ReadingScheduler(NixlPullConnectorScheduler):
    """Decides which requests read, and keeps account."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._reads: dict[str, _Reading] = {}
        self._deadlines: dict[str, float] = {}
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self._block_size = spec.block_size
        # Of one worker; the others hold as much.
        self._block_bytes = sum(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names)
            for group in kv_cache_config.kv_cache_groups
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        params = request.kv_transfer_params
        if not params or DEADLINE not in params:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        if params.get(_HANDLED) or time.monotonic() >= params[DEADLINE]:
            tokens = 0
        else:
            tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens < params[LEAST]:
            tokens = 0
        if tokens == 0:
            # Nothing to read: then nobody waits to be told so either.
            params[_HANDLED] = True
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params
        if num_external_tokens > 0 and params and DEADLINE in params:
            count = -(-num_external_tokens // self._block_size)
            self._reads[request.request_id] = _Reading(
                tokens=num_external_tokens,
                bytes=count * self._block_bytes * params["tp_size"],
                began=time.monotonic(),
            )
            self._deadlines[request.request_id] = params[DEADLINE]
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta: Any = super().build_connector_meta(scheduler_output)
        # As they are: workers start reads only after the step's own work, and that time counts.
        meta.deadlines = self._deadlines
        self._deadlines = {}
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for name in connector_output.finished_recving or ():
            if (reading := self._reads.get(name)) is not None:
                reading.seconds = time.monotonic() - reading.began
                reading.failed = name in connector_output.failed_recving

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        delay, params = super().request_finished(request, block_ids)
        self._deadlines.pop(request.request_id, None)
        reading = self._reads.pop(request.request_id, None)
        if reading is not None and params is not None:
            found = dataclasses.asdict(reading)
            del found["began"]
            params[READ] = found
        return delay, params


class ReadingWorker(NixlPullConnectorWorker):
    """Makes the reads, and fails those that were not over in time."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._until: dict[str, float] = {}

    def start_load_kv(self, metadata: Any) -> None:
        self._until.update(metadata.deadlines)
        super().start_load_kv(metadata)

    def get_transfer_results(self) -> Any:
        results = super().get_transfer_results()
        now = time.monotonic()
        for name in results.finished_recving:
            if now >= self._until.pop(name, now + 1):
                # Whether the last bytes were still the lease's cannot be known.
                results.failed_recving.add(name)
        return results
