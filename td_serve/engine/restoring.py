"""Requests load what a pass has made ready for them: vLLM's connector interface, by a sync load.

What the engine itself has computed of a member's prompt is kept as its history, for a next round.

The scheduler's half knows a request's word for it only (RESTORE in its KV transfer parameters): a
name, so many tokens, and their digest, which must be the prompt's. The worker's half has the KV
itself. Who names a mirror keeps it until the request has ended; of one that is not there all the
same, nothing is loaded, and the engine computes those tokens. How many were loaded is said at the
request's end (LOADED).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from td_serve.engine.leasing import COMPLETE
from td_serve.engine.model import VllmModel
from td_serve.engine.pages import PagedAttention
from td_serve.segments import key
from td_serve.store.codecs import Codec, Codecs
from td_serve.store.families import Mirror, Run
from td_serve.store.kv import KV
from td_serve.store.rounds import WRITTEN, RoundStore

RESTORE = "td_restore"
"""Key of a request's KV transfer parameters: see `Ready`."""

LOADED = "td_loaded"
"""Key of what a request finishes with whose KV was loaded: up to which token of the prompt."""

STORE_BYTES = "td_store_bytes"
"""Key of the connector's extra configuration: what canonical sequences and histories may take."""

_DEFAULT_STORE_BYTES = 2**30

STORE_CODECS = "td_store_codecs"
"""Key of the connector's extra configuration: how histories' diffs and private KV are kept, the
names of two codecs."""

STORE_BELOW = "td_store_below"
"""Key of the connector's extra configuration: URLs of the lower tiers, and bytes of a folder."""


KEEP = "td_keep"
"""Key of a request's KV transfer parameters: see `Keep`."""


OUTPUT = "td_output"
"""Key of a request's KV transfer parameters: see `Output`."""


class Keep(msgspec.Struct, frozen=True):
    """The KV of the prompt's first `tokens` tokens (None: all) shall be kept as the history of this
    name."""

    name: str
    tokens: int | None


def keep_parameters(name: str, tokens: int | None = None) -> dict[str, Any]:
    """The KV transfer parameters of a request, of whose prompt so much is a member's history."""
    return {KEEP: msgspec.to_builtins(Keep(name, tokens))}


class Output(msgspec.Struct, frozen=True):
    """Of the prompt's tokens, `tokens` from `first` on were put out in a turn, where they stood
    from `position` on: their KV shall be kept under this name, for a pass to take over."""

    name: str
    first: int
    tokens: int
    position: int


def output_parameters(output: Output) -> dict[str, Any]:
    """The KV transfer parameters of a request into whose pages a turn's output comes."""
    return {OUTPUT: msgspec.to_builtins(output)}


class Ready(msgspec.Struct, frozen=True):
    """The KV of a prompt's first `tokens` tokens, which have this digest, is kept under a name."""

    name: str
    tokens: int
    digest: str


def ready_parameters(name: str, tokens: Sequence[int]) -> dict[str, Any]:
    """The KV transfer parameters of a request whose prompt begins with these tokens, whose KV is
    kept under a name."""
    return {RESTORE: msgspec.to_builtins(Ready(name, len(tokens), key((), tokens)))}


@dataclass(frozen=True)
class _Load:
    """Tokens [first, last) of a mirror, into a request's blocks."""

    name: str
    first: int
    last: int
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Save:
    """The KV of a finished request's first tokens, from its blocks, to be kept as a history: all of
    it, or what is behind the mirror that it has loaded. Or that from `output.first` on, as what a
    turn has put out."""

    name: str
    token_ids: list[int]
    blocks: list[int]
    is_behind: bool = False
    output: Output | None = None


@dataclass
class _Work(KVConnectorMetadata):
    loads: list[_Load] = field(default_factory=list)
    saves: list[_Save] = field(default_factory=list)


class RoundConnector(KVConnectorBase_V1, SupportsHMA):
    """Made in scheduler and worker processes by vLLM. `store` is the worker's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._promised: dict[str, _Load] = {}
        self._ready: dict[str, _Load] = {}
        self._loaded: dict[str, _Load] = {}
        self._saves: list[_Save] = []
        setting = vllm_config.kv_transfer_config.get_from_extra_config
        if role == KVConnectorRole.WORKER:
            codecs = Codecs(*map(Codec, setting(STORE_CODECS, ())))
            self.store = RoundStore(int(setting(STORE_BYTES, _DEFAULT_STORE_BYTES)), codecs)
            self.below: tuple[list[str], int] = setting(STORE_BELOW, ([], 0))
            self.parts: tuple[VllmModel, PagedAttention] | None = None
            self._pages: list[torch.Tensor] = []
            self._unloaded: set[int] = set()

    # ------------------------------------------------------------------ in the scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        self._promised.pop(request.request_id, None)
        params = request.kv_transfer_params or {}
        if RESTORE not in params:
            return 0, False
        ready = msgspec.convert(params[RESTORE], Ready)
        # One token is left to compute: vLLM wants its logits.
        tokens = min(ready.tokens, request.num_prompt_tokens - 1)
        if tokens <= num_computed_tokens:
            return 0, False
        if key((), request.prompt_token_ids[: ready.tokens]) != ready.digest:
            return 0, False
        self._promised[request.request_id] = _Load(ready.name, num_computed_tokens, tokens)
        return tokens - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        promised = self._promised.pop(request.request_id, None)
        if promised is not None and num_external_tokens > 0:
            (block_ids,) = blocks.get_block_ids()
            load = _Load(promised.name, promised.first, promised.last, list(block_ids))
            self._ready[request.request_id] = self._loaded[request.request_id] = load

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        work = _Work(list(self._ready.values()), self._saves)
        self._ready, self._saves = {}, []
        return work

    def update_connector_output(self, connector_output: Any) -> None:
        """A step is over. vLLM has the requests of blocks that were not loaded compute them."""
        failed = connector_output.invalid_block_ids
        self._loaded = {
            name: load for name, load in self._loaded.items() if failed.isdisjoint(load.blocks)
        }

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._promised.pop(request.request_id, None)
        loaded = self._loaded.pop(request.request_id, None)
        params = request.kv_transfer_params or {}
        if KEEP in params and request.status in COMPLETE:
            keep = msgspec.convert(params[KEEP], Keep)
            # Its blocks are read before the next step writes anything (`handle_preemptions`).
            if tokens := list(request.prompt_token_ids[: keep.tokens]):
                is_behind = RESTORE in params
                self._saves.append(_Save(keep.name, tokens, list(block_ids), is_behind))
        if OUTPUT in params and request.status in COMPLETE:
            output = msgspec.convert(params[OUTPUT], Output)
            tokens = list(request.prompt_token_ids[: output.first + output.tokens])
            self._saves.append(_Save(output.name, tokens, list(block_ids), output=output))
        return False, None if loaded is None else {LOADED: loaded.last}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    # ------------------------------------------------------------------ in the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._pages = list(kv_caches.values())

    @torch.inference_mode()
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Save what is to be saved. vLLM calls this in every step, before it writes to any block;
        `start_load_kv` may come after that."""
        assert isinstance(kv_connector_metadata, _Work)
        if self.parts is None:
            return
        model, attention = self.parts
        for save in kv_connector_metadata.saves:
            with self.store.spending("save"):
                if save.output is not None:
                    kv = _kept(attention, self._pages, save, save.output.first)
                    self.store.keep(WRITTEN, save.name, _put_out(model, kv, save))
                elif (first := self.store.misses(save.name, save.token_ids, save.is_behind)) >= 0:
                    kv = _kept(attention, self._pages, save, first)
                    self.store.keep_longer(save.name, save.token_ids, kv)

    @torch.inference_mode()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._get_connector_metadata().loads
        if self.parts is None:  # there are no passes, or nobody has asked yet
            self._unloaded.update(block for load in loads for block in load.blocks)
            return
        model, attention = self.parts
        for load in loads:
            mirror = self.store.mirrors.get(load.name)
            if mirror is None or len(mirror.token_ids) < load.last:
                self._unloaded.update(load.blocks[load.first // attention.block_size :])
                continue
            with self.store.spending("restore"):
                restore(model, attention, self._pages, mirror, load.blocks, load.first, load.last)

    def get_block_ids_with_load_errors(self) -> set[int]:
        unloaded, self._unloaded = self._unloaded, set()
        return unloaded

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.WORKER and self.store.below is not None:
            self.store.below.close()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is loaded before the first layer."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved from here."""

    def wait_for_save(self) -> None:
        """Nothing is saved from here."""


def _kept(attention: PagedAttention, pages: Sequence[torch.Tensor], save: _Save, first: int) -> KV:
    """What a finished request has left in its blocks from token `first` on."""
    read = [attention.read(memory, save.blocks, first, len(save.token_ids)) for memory in pages]
    return KV([keys for keys, _ in read], [values for _, values in read])


def _put_out(model: VllmModel, kv: KV, save: _Save) -> Run:
    """What a turn has put out, keys before rotation."""
    output = save.output
    assert output is not None, "a turn's output is saved as such"
    positions = torch.arange(output.position, output.position + output.tokens)
    keys = [model.unrotate(layer, positions, found) for layer, found in enumerate(kv.keys)]
    return Run(save.token_ids[output.first :], KV(keys, kv.values))


def restore(
    model: VllmModel,
    attention: PagedAttention,
    pages: Sequence[torch.Tensor],
    mirror: Mirror,
    blocks: Sequence[int],
    first: int,
    last: int,
) -> None:
    """Write tokens [first, last) of a mirror, which stands in `blocks`, into a request's pages,
    layer by layer."""
    table = torch.tensor(blocks)
    for layer, memory in enumerate(pages):
        for positions, keys, values in mirror.parts(model, layer, first, last):
            attention.write(layer, memory, keys, values, attention.slots(table, positions))
