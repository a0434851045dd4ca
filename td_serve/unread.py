"""Settings that are written, and say nothing beside the others: nobody reads them. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Set

import msgspec

from td_serve.config import (
    ConversationConfig,
    DeploymentConfig,
    DispatchSettings,
    FrontendConfig,
    ReplicaConfig,
    ReuseSettings,
)

_OF_BEGINNINGS = {"k"}
_OF_DEVIATIONS = {"ratio", "left", "depth", "run", "own", "weighed"}
"""What rules go by (`pic`)."""


class Unread(msgspec.Struct, frozen=True):
    """A setting by its path, what is written there, and why nobody reads it."""

    place: str
    value: object
    why: str


def unread(config: msgspec.Struct, path: str) -> list[Unread]:
    """Of a config struct, which stands at `path`, and of all below it; what is as it would be if
    nothing were written there is not among them."""
    found = [msgspec.structs.replace(one, place=f"{path}.{one.place}") for one in _in(config)]
    for name in config.__struct_fields__:
        if isinstance(below := getattr(config, name), msgspec.Struct):
            found += unread(below, f"{path}.{name}")
    return found


@functools.singledispatch
def _in(config: msgspec.Struct) -> Iterator[Unread]:
    """Of one struct alone; places are below it."""
    yield from ()


@_in.register
def _(reuse: ReuseSettings) -> Iterator[Unread]:
    rule = f"rule {reuse.rule!r}"
    if reuse.mode == "exact":
        others = set(reuse.__struct_fields__) - {"mode"}
        yield from _written(reuse, others, "mode 'exact' prefills prompts as they are")
        return
    if "first" not in reuse.rule:
        yield from _written(reuse, _OF_BEGINNINGS, f"{rule} chooses no beginnings")
    if "hkvd" not in reuse.rule:
        yield from _written(reuse, _OF_DEVIATIONS, f"{rule} does not look at deviations")
    if reuse.reads_authors:
        yield from _written(reuse, {"ahead"}, "with base 'author' nothing is computed ahead")


@_in.register
def _(dispatch: DispatchSettings) -> Iterator[Unread]:
    if dispatch.attempts == 1:
        yield from _written(dispatch, {"retry_backoff_s"}, "attempts 1 tries nothing again")


@_in.register
def _(conversations: ConversationConfig) -> Iterator[Unread]:
    if not conversations.bidirectional_kv_xfer:
        others = set(conversations.__struct_fields__) - {"bidirectional_kv_xfer"}
        yield from _written(conversations, others, "bidirectional_kv_xfer false keeps no turns")


@_in.register
def _(replica: ReplicaConfig) -> Iterator[Unread]:
    if replica.autoscaling is not None:
        yield from _written(replica, {"num_replicas"}, "autoscaling says how many there are")


@_in.register
def _(frontend: FrontendConfig) -> Iterator[Unread]:
    if not frontend.enable_auto_tool_choice:
        why = "enable_auto_tool_choice false parses no tool calls"
        yield from _written(frontend, {"tool_call_parser"}, why)


@_in.register
def _(deployment: DeploymentConfig) -> Iterator[Unread]:
    for name, value in deployment.decode.engine.items():
        if name.startswith("pass_store_"):
            yield Unread(f"decode.engine.{name}", value, "decode engines prefill no rounds")
    prefill = deployment.engine_of(deployment.prefill, "prefill")
    if not any(url.startswith("fs:") for url in prefill.pass_store_below):
        own = "prefill." if "pass_store_folder_gib" in deployment.prefill.engine else ""
        for one in _written(prefill, {"pass_store_folder_gib"}, "pass_store_below has no folder"):
            yield msgspec.structs.replace(one, place=f"{own}engine.{one.place}")


def _written(config: msgspec.Struct, names: Set[str], why: str) -> Iterator[Unread]:
    """Those of a struct's fields that are not as they would be if nothing were written."""
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        if field.name in names and value != field.default:
            yield Unread(field.name, value, why)
