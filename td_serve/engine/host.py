"""One vLLM engine, hosted in this process: prefill here, decode there.

Lifecycle: `EngineHost.start` (holds a port, starts the engine's process, asserts the transport) →
`prefill` / `decode` / `release`, any number at once → `close`. Cancelling a call aborts its request
in the engine. An engine that has died raises Unavailable from every call and from `check_health`;
it does not come back: its owner makes a new one.

What is pinned, and who frees it: a finished prefill keeps its blocks until the engine that decodes
has read them, or `release` says that nobody will, or the lease (`nixl.lease_s`) ends. A decode
engine keeps a conversation's blocks for its next turn under a lease of its own (`leasing`); a
prefill engine reads them (`reads`) after it has asked for a hold, and computes what it cannot read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from td_serve.breakeven import BreakEven
from td_serve.config import ConversationConfig, EngineConfig, NixlConfig
from td_serve.engine.codec import decode_sampling, to_delta
from td_serve.engine.connector import LEASE_TTL, LEASES_AT, PROGRESS_DELAY, STARTED_BY
from td_serve.engine.grammar import grammar_fault
from td_serve.engine.leasing import (
    LEASE,
    Granted,
    LeaseClient,
    LeaseCounts,
    LeaseOrder,
)
from td_serve.engine.reads import DEADLINE, LEAST, READ
from td_serve.engine.versions import check_vllm
from td_serve.errors import BadRequest, ConfigError, EngineFailure, RequestError, Unavailable
from td_serve.handles import Keeper, common_tokens, digests, same, shorten
from td_serve.transfer.nixl import UcxLog, assert_transports, engine_env, side_channel_host
from td_serve.transfer.ports import PortLease, lease_ports
from td_serve.types import (
    ADMITTED,
    ConversationKey,
    Delta,
    Epoch,
    GenerateRequest,
    Handle,
    Handover,
    LeaseId,
    MemberHandover,
    Read,
    ReaderId,
    ReplicaId,
    ReplicaState,
    RequestId,
    RoundPrefill,
)

log = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]

_THRESHOLD_BEFORE = 64
"""Of `kv_recompute_threshold: auto`, until enough has been measured."""

_NOTHING_HANDED_OVER: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class _Gauges(StatLoggerBase):
    """The engine's last word on its load: how many requests, how full the KV pool.

    The engine reports after every step, and steps as long as anything is running, waiting or
    pinned, so that what stands here is true at idle too.
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


class EngineHost:
    """A prefill or decode engine. Made by `start`, which alone may block for long."""

    def __init__(
        self,
        *,
        role: Role,
        replica: ReplicaId,
        host: str,
        port: PortLease,
        llm: AsyncLLM,
        gauges: _Gauges,
        transports: list[str],
        ucx_log: UcxLog,
        engine: EngineConfig,
        nixl: NixlConfig,
        conversations: ConversationConfig,
        leases: _Leases | None,
        keeper: Keeper | None,
    ) -> None:
        self.role = role
        self.replica = replica
        self.transports = transports
        self.epoch = Epoch(time.time_ns())
        self._host = host
        self._port = port
        self._llm = llm
        self._gauges = gauges
        self._ucx_log = ucx_log
        self._lease_s = nixl.lease_s
        self._engine = engine
        self._conversations = conversations
        self._leases = leases
        self._keeper = keeper
        self._block_size = int(llm.vllm_config.cache_config.block_size)
        self._peers: set[ReplicaId] = set()
        self._break_even = BreakEven(_THRESHOLD_BEFORE)
        self._kept: dict[ConversationKey, Handle] = {}
        """What this engine keeps, as it said so itself; some of it may have ended."""
        self._background: set[asyncio.Task[None]] = set()
        self._members: dict[RequestId, asyncio.Task[Handover]] = {}

    @classmethod
    def start(
        cls,
        role: Role,
        model: str,
        engine: EngineConfig,
        nixl: NixlConfig,
        conversations: ConversationConfig,
        keeper: Keeper | None = None,
        name: str | None = None,
    ) -> EngineHost:
        """Start an engine for `model` (a local directory or hub id) and wait until it can serve.

        A prefill engine reads leased KV if it has a `keeper` to ask for it. `name` begins the
        engine's id, which is new with every start; by default it tells role, machine and process.

        Blocks while the engine loads, seconds to minutes. Raises ConfigError when this vLLM is not
        supported, an engine argument is unknown, no port is free, or a required transport is
        missing.
        """
        check_vllm()
        name = name or f"{role}-{socket.gethostname()}-{os.getpid()}"
        replica = ReplicaId(f"{name}-{uuid.uuid4().hex[:8]}")
        host = side_channel_host(nixl)
        port = lease_ports(*nixl.port_range, count=engine.tensor_parallel_size, host=host)
        ucx_log = UcxLog()
        gauges = _Gauges()
        env = {
            **engine.env,
            **engine_env(nixl, host=host, port=port.first, log=ucx_log),
        }
        leases = _Leases() if role == "decode" and conversations.bidirectional_kv_xfer else None
        llm: AsyncLLM | None = None
        try:
            with _environment(env):
                llm = AsyncLLM.from_engine_args(
                    _engine_args(
                        replica, model, engine, _transfer_config(role, nixl, conversations, leases)
                    ),
                    stat_loggers=[lambda *_: gauges],
                )
            transports = assert_transports(nixl, ucx_log)
        except BaseException:
            if llm is not None:
                llm.shutdown()
            if leases is not None:
                leases.close()
            ucx_log.close()
            port.release()
            raise
        return cls(
            role=role,
            replica=replica,
            host=host,
            port=port,
            llm=llm,
            gauges=gauges,
            transports=transports,
            ucx_log=ucx_log,
            engine=engine,
            nixl=nixl,
            conversations=conversations,
            leases=leases,
            keeper=keeper,
        )

    async def prefill(self, request: GenerateRequest, handle: Handle | None = None) -> Handover:
        """Compute the prompt's KV and keep it pinned for the engine that decodes.

        What `handle` stands for is read where the prompt begins with it; a handle that has ended,
        or is wrong in any way, only means that more is computed. Raises BadRequest, EngineFailure
        or Unavailable.
        """
        tokens = 0 if handle is None else self._readable_tokens(request, handle)
        if handle is None or self._keeper is None or tokens == 0:
            return await self._prefill(request, {}, handle)
        reader = ReaderId(f"{request.request_id}-{uuid.uuid4().hex[:8]}")
        # Begun before asking: the hold lasts at least as long on the engine that grants it.
        began = time.monotonic()
        asking = asyncio.ensure_future(
            self._keeper.hold(handle, reader, self._conversations.read_patience_s)
        )
        try:
            source = await self._source(handle, tokens, began, asking)
            return await self._prefill(request, source, handle)
        finally:
            self._in_background(self._let_go(self._keeper, handle, reader, asking))

    async def _prefill(
        self, request: GenerateRequest, source: Mapping[str, Any], handle: Handle | None
    ) -> Handover:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": {**_NOTHING_HANDED_OVER, **source}},
        )
        last: RequestOutput | None = None
        began = time.monotonic()
        async for output in self._generate(request, params):
            last = output
        took = time.monotonic() - began
        if last is None or last.kv_transfer_params is None:
            raise EngineFailure(f"request {request.request_id}: prefill left no KV to hand over")
        kv = dict(last.kv_transfer_params)
        read = msgspec.convert(kv.pop(READ, None), Read | None)
        cached = last.num_cached_tokens or 0
        self._measure(len(request.prompt_token_ids) - cached, took, read, handle)
        return Handover(
            request_id=request.request_id,
            replica=self.replica,
            kv=kv,
            lease_s=self._lease_s,
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=cached,
            read=read,
            kept_by=None if handle is None else handle.replica,
        )

    async def prefill_round(self, work: RoundPrefill) -> AsyncGenerator[MemberHandover, None]:
        """Prefill a round's members together; each comes as soon as it is ready.

        A member that fails, or is cancelled by `cancel_member`, comes with its error and does not
        fail the others. Closing the generator aborts what is left, and releases nothing.
        """
        tasks = {
            asyncio.ensure_future(
                self.prefill(request, work.handles.get(request.request_id))
            ): request.request_id
            for request in work.requests
        }
        self._members.update((request_id, task) for task, request_id in tasks.items())
        try:
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield self._part(tasks.pop(task), task)
        finally:
            for task, request_id in tasks.items():
                self._members.pop(request_id, None)
                task.cancel()

    def cancel_member(self, request_id: RequestId) -> None:
        """Abort a member of a round under way, if this engine has it."""
        if (task := self._members.get(request_id)) is not None:
            task.cancel()

    def _part(self, request_id: RequestId, task: asyncio.Task[Handover]) -> MemberHandover:
        """What has become of a member whose task is done."""
        self._members.pop(request_id, None)
        if task.cancelled():
            return MemberHandover(request_id=request_id, error="cancelled")
        try:
            return MemberHandover(request_id=request_id, handover=task.result())
        except RequestError as error:
            return MemberHandover(request_id=request_id, error=error.message)

    async def decode(
        self, request: GenerateRequest, handover: Handover | None
    ) -> AsyncGenerator[Delta, None]:
        """Continue the prompt, with KV read from `handover` or, without one, computed here.

        The first delta is empty: it says that the handover is this engine's from now on, to be read
        or given up on every path, abort included. A turn of a conversation ends with a handle, if
        its KV is kept. Raises BadRequest, EngineFailure or Unavailable.
        """
        if handover is not None and handover.request_id != request.request_id:
            raise EngineFailure(
                f"request {request.request_id} came with the handover of {handover.request_id}"
            )
        first = True
        order: dict[str, Any] = {}
        try:
            yield ADMITTED
            params = decode_sampling(request.sampling)
            order = kept = self._order(request)
            if handover is not None and request.n > 1:
                # vLLM gives each continuation the same handle, and a handle serves one read: read
                # the prompt once, then let all continuations hit this engine's own prefix cache.
                await self._pull(request, handover)
            elif handover is not None:
                kept = {**handover.kv, **kept}
            if kept:
                params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": kept}
            generated: list[int] = []
            async for output in self._generate(request, params):
                generated += (token for one in output.outputs for token in one.token_ids)
                cached = output.num_cached_tokens or 0
                delta = to_delta(
                    output,
                    cached_tokens=cached if handover is None else handover.cached_tokens,
                    first=first,
                )
                first = False
                if delta.finished:
                    handle = self._handle(
                        request,
                        generated,
                        output.kv_transfer_params,
                        None if handover is None else handover.replica,
                    )
                    delta = msgspec.structs.replace(delta, handle=handle)
                    order = {}  # kept, and known to be
                yield delta
        except BaseException:
            # Before its first output the engine may not have taken the request at all. If it has,
            # it gives the handover up too, and the prefill engine ignores the second word.
            if handover is not None and first:
                with contextlib.suppress(Unavailable):
                    await self.release(handover)
            if order:
                self._in_background(self._cancel(order))
            raise

    async def release(self, handover: Handover) -> None:
        """Tell the engine that holds `handover`'s blocks that nobody will read them.

        Raises Unavailable.
        """
        try:
            await self._llm.notify_kv_transfer_request_rejected(
                f"{handover.request_id}-release-{uuid.uuid4().hex[:8]}", handover.kv
            )
        except EngineDeadError as error:
            raise Unavailable(f"{self.replica}: the engine has died") from error

    async def hold(self, handle: Handle, reader: ReaderId, for_s: float) -> bool:
        """Keep a lease's blocks for at least `for_s` seconds from now, or until let go.

        False when this engine does not keep them, or not any more. Raises Unavailable.
        """
        ours = self._kept.get(handle.conversation)
        if self._leases is None or ours is None or not same(handle, ours):
            return False
        return await self._leases.client.hold(handle.lease, reader, for_s)

    async def let_go(self, handle: Handle, reader: ReaderId) -> None:
        """The reader is done, whichever way. Raises Unavailable."""
        if self._leases is not None:
            await self._leases.client.let_go(handle.lease, reader)

    async def forget(self, conversation: ConversationKey) -> bool:
        """Free what is kept for a conversation. Says whether anything was. Raises Unavailable."""
        forgotten = self._leases is not None and await self._leases.client.forget(conversation)
        if forgotten:
            await self._wake()
        return forgotten

    async def lease_counts(self) -> LeaseCounts:
        """The leases right now; also has the engine free what has ended. Raises Unavailable."""
        if self._leases is None:
            return LeaseCounts(live={}, blocks=0, unfreed=0, ends={})
        before = list(self._kept.values())
        counts = await self._leases.client.counts()
        for handle in before:
            # One that was granted while we asked is not among the live ones yet.
            if handle.lease not in counts.live and self._kept.get(handle.conversation) is handle:
                del self._kept[handle.conversation]
        if counts.unfreed:
            await self._wake()
        return counts

    async def retained_share(self) -> float:
        """The share of the KV pool that is kept for next turns, 0 to 1. Raises Unavailable."""
        blocks = self._llm.vllm_config.cache_config.num_gpu_blocks
        return (await self.lease_counts()).blocks / blocks if blocks else 0.0

    @property
    def preemptions(self) -> int:
        """How many times a running request had to give its blocks up, since the start."""
        return self._gauges.preemptions

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        return int(self._llm.model_config.get_vocab_size())

    async def live_leases(self) -> set[LeaseId]:
        """The leases that have not ended. Raises Unavailable."""
        return set((await self.lease_counts()).live)

    def state(self) -> ReplicaState:
        """Who this engine is and what it holds right now."""
        return ReplicaState(
            replica=self.replica,
            role=self.role,
            epoch=self.epoch,
            host=self._host,
            nixl_port=self._port.first,
            transports=self.transports,
            running=self._gauges.running,
            waiting=self._gauges.waiting,
            kv_usage=self._gauges.kv_usage,
            leases=len(self._kept),
        )

    async def check_health(self) -> None:
        """Raises Unavailable when the engine has died."""
        try:
            await self._llm.check_health()
        except EngineDeadError as error:
            raise Unavailable(f"{self.replica}: the engine has died") from error

    def close(self) -> None:
        """Stop the engine's process and give the port back. Call once."""
        self._llm.shutdown()
        del self._llm  # vLLM shuts down once more when collected, too late at interpreter exit
        if self._leases is not None:
            self._leases.close()
        self._port.release()
        self._ucx_log.close()

    def _readable_tokens(self, request: GenerateRequest, handle: Handle) -> int:
        """How many of a handle's tokens can be read and are worth it."""
        least = self._least_tokens()
        fits = (handle.block_size, handle.tp_size) == (
            self._block_size,
            self._engine.tensor_parallel_size,
        )
        if least is None or not fits:
            return 0
        tokens = common_tokens(handle, request.prompt_token_ids, request.cache_salt)
        return tokens if tokens >= least else 0

    @staticmethod
    async def _let_go(
        keeper: Keeper, handle: Handle, reader: ReaderId, asking: asyncio.Future[bool]
    ) -> None:
        """Give a hold up, after it has been answered: the other way round it would stay."""
        with contextlib.suppress(RequestError):
            await asking
        await keeper.let_go(handle, reader)

    async def _source(
        self, handle: Handle, tokens: int, began: float, asking: asyncio.Future[bool]
    ) -> dict[str, Any]:
        """What to read of a handle, as KV transfer parameters, held; empty: it is not kept."""
        patience_s = self._conversations.read_patience_s
        try:
            held = await asyncio.shield(asking)
        except RequestError as error:
            log.warning("lease %s is not read: %s", handle.lease, error.message)
            return {}
        self._break_even.asked(time.monotonic() - began)
        if not held:
            return {}
        handle = shorten(handle, tokens)
        return {
            "remote_engine_id": handle.replica,
            # The reading engine names it when it has read. As a heartbeat's it is ignored: leases
            # end by themselves, not by being read.
            "remote_request_id": f"HB:{handle.lease}",
            "remote_host": handle.host,
            "remote_port": handle.port,
            "remote_block_ids": handle.block_ids,
            "remote_num_tokens": handle.tokens,
            "tp_size": handle.tp_size,
            DEADLINE: began + patience_s,
            LEAST: self._least_tokens() or 1,
        }

    def _measure(
        self, computed: int, took_s: float, read: Read | None, handle: Handle | None
    ) -> None:
        """Learn from a prefill what computing and reading take."""
        if read is None:
            self._break_even.computed(computed, took_s)
        elif read.failed or handle is None:
            return  # what was computed when cannot be told apart
        else:
            self._break_even.computed(computed, took_s - read.seconds)
            if handle.replica in self._peers:
                self._break_even.read(read.tokens, read.seconds)
            # The first read of a peer is a handshake too.
            self._peers.add(handle.replica)

    def _least_tokens(self) -> int | None:
        """How many tokens must be there to be read; None: reading never pays."""
        if self._conversations.kv_recompute_threshold == "auto":
            return self._break_even.tokens
        return max(1, self._conversations.kv_recompute_threshold)

    async def _cancel(self, order: Mapping[str, Any]) -> None:
        """Nobody has learnt of the lease that a turn ordered: end it, if it was granted."""
        assert self._leases is not None
        if await self._leases.client.end(msgspec.convert(order[LEASE], LeaseOrder).id):
            await self._wake()

    def _order(self, request: GenerateRequest) -> dict[str, Any]:
        """The KV transfer parameters that have a turn kept."""
        if self._leases is None or request.conversation is None or request.n > 1:
            return {}
        order = LeaseOrder(id=LeaseId(uuid.uuid4().hex), conversation=request.conversation)
        return {LEASE: msgspec.to_builtins(order)}

    def _handle(
        self,
        request: GenerateRequest,
        generated: list[int],
        kv: Mapping[str, Any] | None,
        prefilled_by: ReplicaId | None,
    ) -> Handle | None:
        """The handle of a finished turn, if its KV is kept."""
        if request.conversation is None or kv is None or LEASE not in kv:
            return None
        granted = msgspec.convert(kv[LEASE], Granted)
        tokens = [*request.prompt_token_ids, *generated][: granted.tokens]
        block_size = granted.block_size
        whole = len(tokens) // block_size * block_size
        handle = Handle(
            lease=granted.id,
            conversation=request.conversation,
            replica=self.replica,
            epoch=self.epoch,
            host=self._host,
            port=self._port.first,
            tp_size=self._engine.tensor_parallel_size,
            block_size=block_size,
            block_ids=[granted.block_ids],
            tokens=len(tokens),
            digests=digests(tokens, block_size, request.cache_salt),
            tail=tokens[whole:],
            remaining_s=granted.ttl_s,
            prefilled_by=prefilled_by,
        )
        self._kept[request.conversation] = handle
        return handle

    async def _refuse_grammar(self, params: SamplingParams) -> None:
        """Raises BadRequest when it was the request's grammar that the engine could not take."""
        tokenizer = self._llm.get_tokenizer()
        fault = await asyncio.to_thread(grammar_fault, self._llm.vllm_config, tokenizer, params)
        if fault is not None:
            raise BadRequest(f"structured_outputs: {fault}", field="structured_outputs")

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            # Whom it cannot reach has died, and forgets by itself.
            with contextlib.suppress(RequestError):
                await work

        task = asyncio.get_running_loop().create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _wake(self) -> None:
        """Have the engine take one step, in which it frees what has ended."""
        try:
            await self._llm.notify_kv_transfer_request_rejected(f"wake-{uuid.uuid4().hex}", {})
        except EngineDeadError as error:
            raise Unavailable(f"{self.replica}: the engine has died") from error

    async def _pull(self, request: GenerateRequest, handover: Handover) -> None:
        """Read a handed-over prompt into this engine's prefix cache."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": handover.kv},
        )
        async for _ in self._generate(request, params):
            pass

    async def _generate(
        self, request: GenerateRequest, params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's own generate, with its errors translated to ours."""
        prompt = TokensPrompt(prompt_token_ids=request.prompt_token_ids)
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        outputs = self._llm.generate(
            prompt,
            params,
            request.request_id,
            priority=request.priority,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=request.reasoning_parser_kwargs,
        )
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    if any(choice.finish_reason == "error" for choice in output.outputs):
                        await self._refuse_grammar(params)
                        raise Unavailable(
                            f"request {request.request_id}: {self.replica} could not load its KV"
                        )
                    yield output
        except RequestError:
            raise
        except EngineDeadError as error:
            raise Unavailable(f"{self.replica}: the engine has died") from error
        except (VLLMClientError, ValueError) as error:
            raise BadRequest(str(error)) from error
        except GracefulHTTPError as error:
            raise Unavailable(f"{self.replica}: {error}") from error
        except Exception as error:
            raise EngineFailure(
                f"request {request.request_id}: {self.replica} failed: {error!r}"
            ) from error


class _Leases:
    """Where a decode engine and its host meet about leases: a socket that nobody else can open."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="td-leases-"))
        self.address = f"ipc://{self._directory}/socket"
        self.client = LeaseClient(self.address)

    def close(self) -> None:
        self.client.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _engine_args(
    replica: ReplicaId, model: str, engine: EngineConfig, transfer: Mapping[str, Any]
) -> AsyncEngineArgs:
    known = AsyncEngineArgs.__dataclass_fields__
    for name in engine.extra:
        if name not in known:
            raise ConfigError(f"engine.extra.{name}: vLLM has no engine argument of that name")
    optional = {
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "kv_cache_memory_bytes": None
        if engine.kv_cache_gib is None
        else int(engine.kv_cache_gib * 2**30),
    }
    return AsyncEngineArgs(
        model=model,
        dtype=engine.dtype,
        block_size=engine.block_size,
        tensor_parallel_size=engine.tensor_parallel_size,
        enforce_eager=engine.enforce_eager,
        enable_prefix_caching=engine.enable_prefix_caching,
        seed=engine.seed,
        enable_log_requests=False,
        kv_transfer_config=KVTransferConfig(engine_id=replica, **transfer),
        **{name: value for name, value in optional.items() if value is not None},
        **engine.extra,
    )


def _transfer_config(
    role: Role, nixl: NixlConfig, conversations: ConversationConfig, leases: _Leases | None
) -> dict[str, Any]:
    """vLLM's KV transfer configuration for one role, without the engine's id."""
    extra: dict[str, Any] = {
        "backends": [nixl.backend],
        "kv_lease_duration": nixl.lease_s,
        PROGRESS_DELAY: nixl.progress_delay_us,
        STARTED_BY: os.getpid(),
    }
    if leases is not None:
        extra |= {LEASES_AT: leases.address, LEASE_TTL: conversations.decoder_kv_blocks_ttl}
    if role == "prefill":
        # Only the reader needs vLLM's switch: on a decode engine it would pin finished requests
        # vLLM's own way, beside the leases.
        extra |= {
            "bidirectional_kv_xfer": conversations.bidirectional_kv_xfer,
            "kv_recompute_threshold": 0,  # each request says its own (LEAST)
        }
    return {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "td_serve.engine.connector",
        "kv_role": "kv_both",
        "kv_buffer_device": current_platform.device_type,
        # A decode engine's read that fails is retried from the prefill on, by whoever dispatched
        # it; a prefill engine computes what it could not read.
        "kv_load_failure_policy": "fail" if role == "decode" else "recompute",
        "kv_connector_extra_config": extra,
    }


@contextlib.contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
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
