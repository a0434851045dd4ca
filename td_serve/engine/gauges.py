"""An engine's load, by its own word."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class Gauges(StatLoggerBase):
    """The engine's last word on its load: how many requests, how full the KV pool.

    The engine reports after every step, and steps as long as anything is running, waiting or
    pinned, so that what stands here is true at idle too. `preemptions` counts from the start: how
    many times a running request had to give its blocks up.
    """

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.preemptions = 0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.waiting = (
                scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            )
            self.kv_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
