"""Every metric, named once. What counts them is handed in, so that domain code knows no exporter.

Names follow Prometheus; Ray exports them with the prefix `ray_`. No label ever names a session or a
conversation: their number has no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from td_serve.leases import End
from td_serve.types import Alone, PassTokens


class Counter(Protocol):
    def inc(self, value: float = 1.0) -> None: ...


class Histogram(Protocol):
    def observe(self, value: float) -> None: ...


class Gauge(Protocol):
    def set(self, value: float) -> None: ...


@dataclass(frozen=True)
class Meter:
    """Makes instruments: (name, description[, upper bounds of buckets])."""

    counter: Callable[[str, str], Counter]
    histogram: Callable[[str, str, Sequence[float]], Histogram]
    gauge: Callable[[str, str], Gauge]


_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_DEVIATIONS = (0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.004, 0.01, 0.02, 0.05, 0.1)
_MEMBERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The instruments of one process."""

    def __init__(self, meter: Meter) -> None:
        self.round_seconds = meter.histogram(
            "td_round_duration_seconds",
            "From a round's first member to its last member's last token.",
            _SECONDS,
        )
        self.gather_seconds = meter.histogram(
            "td_round_gather_seconds", "From a round's first member to its dispatch.", _SECONDS
        )
        self.round_members = meter.histogram(
            "td_round_members", "Members dispatched as one unit.", _MEMBERS
        )
        self.stragglers = meter.counter(
            "td_round_stragglers_total",
            "Members served alone: too late for their round, or again after a failure.",
        )
        self.blended = meter.counter(
            "td_round_members_blended_total", "Members prefilled by their round's pass."
        )
        self.members_alone = {
            why: meter.counter(
                f"td_round_members_alone_{why.name.lower()}_total",
                f"Members of a round that blends, prefilled as they are: {why.value}.",
            )
            for why in Alone
        }
        self.pass_tokens = {
            source: meter.counter(f"td_pass_tokens_{source}_total", text)
            for source, text in (
                ("local", "Tokens of members of passes whose KV was kept from earlier rounds."),
                ("reused", "Shared tokens that were taken over."),
                ("selected", "Shared tokens that were computed anew all the same."),
                ("new", "Tokens of members of passes that are their own, and were computed."),
            )
        }
        self.deviation_left = meter.histogram(
            "td_pass_deviation_left",
            "How far what members of a pass took over deviates from their own: squared, the mean.",
            _DEVIATIONS,
        )
        self.not_blended = meter.counter(
            "td_round_members_not_blended_total",
            "Members of a pass that were prefilled alone after all, or not at all.",
        )
        self.prompt_tokens = meter.counter("td_prompt_tokens_total", "Prompt tokens served.")
        self.tokens_saved = meter.counter(
            "td_prefill_tokens_saved_total", "Prompt tokens that no engine computed."
        )
        self.retries = meter.counter(
            "td_request_retries_total",
            "Requests started anew: an engine failed, or none took them in time.",
        )
        self.reads = meter.counter(
            "td_kv_reads_total", "Turns whose KV was read back from a decode engine."
        )
        self.reads_failed = meter.counter(
            "td_kv_reads_failed_total",
            "Reads that were computed instead: not over in time, or their engine died.",
        )
        self.tokens_read = meter.counter("td_kv_read_tokens_total", "Tokens read back.")
        self.bytes_read = meter.counter("td_kv_read_bytes_total", "Bytes read back.")
        self.lease_ends = {
            why: meter.counter(f"td_kv_lease_{why.value}_total", text)
            for why, text in (
                (End.EXPIRED, "Kept turns that nobody came back for in time."),
                (End.SUPERSEDED, "Kept turns that a newer turn took the place of."),
                (End.DELETED, "Kept turns that were given up, or whose conversation was."),
                (End.RECLAIMED, "Kept turns whose room live requests needed."),
            )
        }
        self.leases = meter.gauge("td_kv_lease_active", "Turns kept for a next one here.")
        self.directory_epoch = meter.gauge(
            "td_directory_epoch", "Birth number of the directory this replica is registered with."
        )

    def count_blended(self, counted: PassTokens) -> None:
        """A pass has prefilled a member."""
        self.blended.inc()
        for source, tokens in (
            ("local", counted.local),
            ("reused", counted.reused),
            ("selected", counted.selected),
            ("new", counted.new),
        ):
            if tokens:  # Ray's counters refuse to count nothing
                self.pass_tokens[source].inc(float(tokens))
        if counted.left is not None:
            self.deviation_left.observe(counted.left)


class _Silent:
    """Counts nothing."""

    def inc(self, value: float = 1.0) -> None: ...

    def observe(self, value: float) -> None: ...

    def set(self, value: float) -> None: ...


def silent_metrics() -> Metrics:
    """Metrics for a process without an exporter (examples, tests)."""
    silent = _Silent()
    return Metrics(
        Meter(
            counter=lambda name, text: silent,
            histogram=lambda name, text, bounds: silent,
            gauge=lambda name, text: silent,
        )
    )
