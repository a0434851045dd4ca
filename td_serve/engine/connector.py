"""vLLM's NIXL connector, with leases, in processes that sleep and do not outlive us.

NIXL's Python API starts UCX's progress thread with a polling delay of 0 and offers no way to say
otherwise, so that every engine burns a core while idle. On a machine where engines compute on those
cores that halves their speed. Here the agent is made with a delay: the thread then sleeps in
poll(2) and wakes on traffic, at the latest after the delay.

vLLM's engine processes survive when the process that started them is killed: they would hold their
memory, and their registered KV, for ever. A connector is made in each of them, so it is where they
ask the kernel to end with their parent.

A decode engine keeps finished turns under a lease (`leasing`), a prefill engine reads them
(`reads`): this is where vLLM calls for both.

The class is named like vLLM's, because vLLM looks for that name in its configuration checks;
`kv_connector_module_path` makes it take ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
from nixl import _api as nixl_api
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
    NixlPullConnector,
)

from td_serve.engine.leasing import LeaseKeeper
from td_serve.engine.reads import ReadingScheduler, ReadingWorker

_PR_SET_PDEATHSIG = 1

STARTED_BY = "td_started_by"
"""Key of the connector's extra configuration: the process id of the engine's host."""

PROGRESS_DELAY = "td_progress_delay_us"
"""Key of the connector's extra configuration: microseconds; 0 is NIXL's own busy polling."""

LEASES_AT = "td_leases_at"
"""Key of the connector's extra configuration: the ZeroMQ address at which a decode engine answers
for its leases. Without it none is granted."""

LEASE_TTL = "decoder_kv_blocks_ttl"
"""Key of the connector's extra configuration, vLLM's own: a lease's seconds."""


class NixlConnector(NixlPullConnector):
    """The pull connector; made in scheduler and worker processes by vLLM."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        setting = vllm_config.kv_transfer_config.get_from_extra_config
        _end_with_parent(int(setting(STARTED_BY, 0)))
        # Not the pull connector's own: it would make its own scheduler or worker.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        self._keeper: LeaseKeeper | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = ReadingScheduler(
                vllm_config, self.engine_id, kv_cache_config
            )
            if address := setting(LEASES_AT, None):
                self._keeper = LeaseKeeper(float(setting(LEASE_TTL, 480)), address)
        else:
            with _progress_delay(int(setting(PROGRESS_DELAY, 0))):
                self.connector_worker = ReadingWorker(vllm_config, self.engine_id, kv_cache_config)

    # ------------------------------------------------------------------ a decode engine's leases

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._keeper is not None:
            self._keeper.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if self._keeper is not None:
            self._keeper.settle()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._keeper is not None:
            if self._keeper.is_short:
                return None, False  # asked again in the next step
            self._keeper.make_room_for(request, num_computed_tokens)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def has_pending_block_frees(self) -> bool:
        """Asked when a running request finds no block: leases go before it is preempted."""
        return self._keeper is not None and self._keeper.make_some_room()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if self._keeper is not None:
            self._keeper.end_step()
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        delay, params = super().request_finished_all_groups(request, block_ids)
        if self._keeper is not None and (kept := self._keeper.grant(request, block_ids)):
            params = {**(params or {}), **kept}
        return delay, params

    def shutdown(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
        super().shutdown()


def _end_with_parent(started_by: int) -> None:
    """Have the kernel kill this process when its parent dies (prctl(2), Linux).

    `started_by` is the process that hosts the engine: had it died before, nobody would tell.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    family = [os.getpid(), *(parent.pid for parent in psutil.Process().parents())]
    if started_by and started_by not in family:
        raise SystemExit(f"process {started_by}, which started this engine, has ended")


@contextlib.contextmanager
def _progress_delay(delay_us: int) -> Iterator[None]:
    """Agents made within get this delay, whatever the Python API sets."""
    bindings = nixl_api.nixlBind

    class AgentConfig(bindings.nixlAgentConfig):  # type: ignore[name-defined]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, delay_us if name == "pthrDelay" else value)

    nixl_api.nixlBind = _Bindings(bindings, AgentConfig)
    try:
        yield
    finally:
        nixl_api.nixlBind = bindings


class _Bindings:
    """NIXL's bindings with another agent configuration."""

    def __init__(self, bindings: Any, agent_config: type) -> None:
        self._bindings = bindings
        self.nixlAgentConfig = agent_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)
