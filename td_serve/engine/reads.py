"""Reads of another engine's KV, by vLLM's pull connector, made safe.

vLLM's own connector reads what it is told to. What it does not do is done here, in subclasses: a
read that was not over while its blocks were sure to be kept is thrown away and computed instead,
and a request that is scheduled anew (preempted, or its read failed) is not parked for a read that
nobody makes.

How long blocks are sure to be kept: a prefill engine is promised a time (DEADLINE). A decode engine
takes a request before half of the handover's lease is over (`dispatch`); from then on each
heartbeat that it sends in time renews the lease. A decode engine that stood still for too long must
not believe what it reads.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from td_serve.types import Read

DEADLINE = "td_deadline"
"""Key of a request's KV transfer parameters: until when (CLOCK_MONOTONIC of this machine, seconds)
the blocks that it names are sure to be kept."""

PINNED_UNTIL = "td_pinned_until"
"""Key of a handed-over request's KV transfer parameters: the same, unless heartbeats renew it."""

LEAST = "td_least"
"""Key of a request's KV transfer parameters: fewer tokens than these are computed, not read."""

READ_ONLY = "td_read_only"
"""Key of a request's KV transfer parameters: it reads, and hands nothing over."""

FOUND = "td_found"
"""Key of what a request finishes with: see `Found`."""

_HANDLED = "_remote_blocks_processed"
"""vLLM's own mark in the parameters: the request's one read has been made, or is not wanted."""


class Found(msgspec.Struct, frozen=True):
    """What a prompt did not have to be computed of: `cached` tokens, those that were read included.

    vLLM's own count stands for a request's first start only: one that was preempted had to begin
    anew, without what it had read.
    """

    cached: int
    read: Read | None


@dataclasses.dataclass
class _Reading:
    """A read, from its order on."""

    tokens: int
    bytes: int
    began: float
    seconds: float = 0.0
    failed: bool = False

    def as_read(self) -> Read:
        return Read(tokens=self.tokens, bytes=self.bytes, seconds=self.seconds, failed=self.failed)


class ReadingScheduler(NixlPullConnectorScheduler):
    """Decides which requests read, and keeps account."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._reads: dict[str, _Reading] = {}
        self._deadlines: dict[str, float] = {}
        self._cached: dict[str, int] = {}
        self._gone: list[str] = []
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self._block_size = spec.block_size
        # Of one worker; the others hold as much.
        self._block_bytes = sum(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names)
            for group in kv_cache_config.kv_cache_groups
        )

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        params = request.kv_transfer_params
        if params and PINNED_UNTIL in params:
            self._deadlines[request.request_id] = params[PINNED_UNTIL]

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        tokens, is_read = self._readable(request, num_computed_tokens)
        self._cached[request.request_id] = num_computed_tokens + tokens
        if (reading := self._reads.get(request.request_id)) is not None:
            reading.failed = True  # its request begins anew
        return tokens, is_read

    def _readable(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens of the prompt are read, and whether that takes more than this step."""
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
        meta.deadlines, self._deadlines = self._deadlines, {}
        meta.gone, self._gone = self._gone, []
        meta.renewed = defaultdict(list)
        if meta.heartbeat_by_engine:
            for name, (engine, _) in self._heartbeat_req_engine.items():
                meta.renewed[engine].append(name)
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
        self._gone.append(request.request_id)
        reading = self._reads.pop(request.request_id, None)
        cached = self._cached.pop(request.request_id, 0)
        if delay and READ_ONLY in request.kv_transfer_params:
            # vLLM has pinned its blocks for whoever decodes.
            del self._reqs_need_send[request.request_id]
            self._reqs_not_processed.add(request.request_id)
            delay = False
        if params is not None:
            found = Found(cached, None if reading is None else reading.as_read())
            params[FOUND] = msgspec.to_builtins(found)
        return delay, params


class ReadingWorker(NixlPullConnectorWorker):
    """Makes the reads, and fails those that were not over in time."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._until: dict[str, float] = {}

    def start_load_kv(self, metadata: Any) -> None:
        for name in metadata.gone:
            self._until.pop(name, None)
        self._until.update(metadata.deadlines)
        now = time.monotonic()
        for engine, names in metadata.renewed.items():
            if engine in self._remote_agents:  # or no heartbeat is sent yet
                for name in names:
                    # What had ended before does not come back.
                    if now < self._until.get(name, now):
                        self._until[name] = max(self._until[name], now + self._lease_extension)
        super().start_load_kv(metadata)

    def get_transfer_results(self) -> Any:
        results = super().get_transfer_results()
        now = time.monotonic()
        for name in results.finished_recving:
            if now >= self._until.pop(name, now + 1):
                # Whether the last bytes were still the lease's cannot be known.
                results.failed_recving.add(name)
        return results
