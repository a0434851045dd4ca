"""One vLLM engine, hosted in this process: prefill here, decode there.

Lifecycle: `EngineHost.start` (holds a port, starts the engine's process, asserts the transport) →
`prefill` / `decode` / `release`, any number at once → `close`. Cancelling a call aborts its request
in the engine. An engine that has died raises Unavailable from every call and from `check_health`;
it does not come back: its owner makes a new one.

What is pinned, and who frees it: a finished prefill keeps its blocks until the engine that decodes
has read them, or `release` says that nobody will, or the lease (`nixl.lease_s`) ends. A decode
engine keeps a conversation's blocks for its next turn under a lease of its own (`keeping`), or for
those who read what it has put out; a prefill engine reads them under a hold (`reading`, `outputs`),
and computes what it cannot read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from td_serve.config import ConversationConfig, EngineConfig, NixlConfig
from td_serve.engine.arguments import Role, engine_arguments, environment, transfer_arguments
from td_serve.engine.codec import decode_sampling, to_delta
from td_serve.engine.foreseeing import Foreseeing
from td_serve.engine.gauges import Gauges
from td_serve.engine.generation import generate
from td_serve.engine.keeping import Keeping, LeaseSocket, Place
from td_serve.engine.members import Members
from td_serve.engine.outputs import Outputs
from td_serve.engine.passes import RoundPasses
from td_serve.engine.reading import Reading
from td_serve.engine.reads import FOUND, PINNED_UNTIL, Found
from td_serve.engine.restoring import LOADED
from td_serve.engine.versions import check_vllm
from td_serve.errors import EngineFailure, Unavailable
from td_serve.handles import Keeper
from td_serve.leases import LeaseCounts
from td_serve.transfer.nixl import UcxLog, assert_transports, engine_env, side_channel_host
from td_serve.transfer.ports import PortLease, lease_ports
from td_serve.types import (
    ADMITTED,
    ConversationKey,
    Delta,
    Epoch,
    Forecast,
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

_DRAIN_LOOKS_UP_S = 0.1
_SLICE_S = 0.25
_NO_PARAMETERS: Mapping[str, Any] = {}
_NOTHING_HANDED_OVER: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


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
        gauges: Gauges,
        transports: list[str],
        ucx_log: UcxLog,
        engine: EngineConfig,
        nixl: NixlConfig,
        conversations: ConversationConfig,
        leases: LeaseSocket | None,
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
        tp_size = engine.tensor_parallel_size
        # The engine's own: vLLM may have chosen another than it was given.
        block_size = int(llm.vllm_config.cache_config.block_size)
        self.reading = Reading(keeper, conversations, block_size, tp_size)
        place = Place(
            replica=replica, epoch=self.epoch, host=host, port=port.first, tp_size=tp_size
        )
        self._keeping = None if leases is None else Keeping(leases, place, self._wake)
        self._passes = RoundPasses(llm, _SLICE_S)
        self._outputs = Outputs(self._prefill, self.reading, self._passes)
        self._members = Members(self.prefill, self._prefill, self._passes, self._outputs)
        self._foreseeing = Foreseeing(
            self._passes, llm.renderer.tokenizer if role == "prefill" else None
        )

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
        gauges = Gauges()
        env = {
            **engine.env,
            **engine_env(nixl, host=host, port=port.first, log=ucx_log),
        }
        keeps = role == "decode" and conversations.bidirectional_kv_xfer
        leases = LeaseSocket(port) if keeps else None
        llm: AsyncLLM | None = None
        try:
            transfer = transfer_arguments(
                role, engine, nixl, conversations, None if leases is None else leases.address
            )
            with environment(env):
                llm = AsyncLLM.from_engine_args(
                    engine_arguments(role, replica, model, engine, transfer),
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

    async def prefill(
        self,
        request: GenerateRequest,
        handle: Handle | None = None,
        parameters: Mapping[str, Any] = _NO_PARAMETERS,
    ) -> Handover:
        """Compute the prompt's KV and keep it pinned for the engine that decodes.

        What `handle` stands for is read where the prompt begins with it; a handle that has ended,
        or is wrong in any way, only means that more is computed. `parameters` are more of the
        request's KV transfer parameters. Raises BadRequest, EngineFailure or Unavailable.
        """
        self._passes.give_way()
        async with self.reading.of(request, handle) as source:
            began = time.monotonic()
            handover = await self._prefill(request, {**source, **parameters})
            took_s = time.monotonic() - began
        computed = handover.prompt_tokens - handover.cached_tokens
        self.reading.learn(computed, took_s, handover.read, handle)
        kept_by = None if handle is None else handle.replica
        return msgspec.structs.replace(handover, kept_by=kept_by)

    async def _prefill(self, request: GenerateRequest, source: Mapping[str, Any]) -> Handover:
        """Have the engine prefill, with KV from what these KV transfer parameters name."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": {**_NOTHING_HANDED_OVER, **source}},
        )
        last: RequestOutput | None = None
        async for output in self._generate(request, params):
            last = output
        kv = dict((last and last.kv_transfer_params) or {})
        if FOUND not in kv:
            raise EngineFailure(f"request {request.request_id}: prefill left no KV to hand over")
        found = msgspec.convert(kv.pop(FOUND), Found)
        loaded = kv.pop(LOADED, 0)
        return Handover(
            request_id=request.request_id,
            replica=self.replica,
            kv=kv,
            lease_s=self._lease_s,
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=max(found.cached, loaded),
            read=found.read,
        )

    def prefill_round(self, work: RoundPrefill) -> AsyncGenerator[MemberHandover, None]:
        """Prefill a round's members together; each comes as soon as it is ready.

        A member that fails, or is cancelled by `cancel_member`, comes with its error and does not
        fail the others. Closing the generator aborts what is left, and releases nothing.
        """
        return self._members.play(work)

    def take_reads(self) -> list[Read]:
        """The reads for rounds as a whole that were made since this was asked last."""
        return self._outputs.take_reads()

    def cancel_member(self, request_id: RequestId) -> None:
        """Abort a member of a round under way, if this engine has it."""
        self._members.cancel(request_id)

    async def prepare(self, forecast: Forecast) -> None:
        """Compute what a next round will share, as far as it can be told, unless there is something
        else to do. Raises Unavailable."""
        if not self._gauges.running and not self._gauges.waiting:
            await self._foreseeing.prepare(forecast)

    async def why_no_passes(self) -> str | None:
        """Why members of rounds are prefilled one by one here, whatever a plan says; None if they
        are not. Raises Unavailable."""
        return await self._passes.why_none() if self.role == "prefill" else None

    async def mirrors(self) -> int:
        """For how many members of rounds this engine keeps what passes have made."""
        return await self._passes.mirrors()

    async def decode(
        self, request: GenerateRequest, handover: Handover | None
    ) -> AsyncGenerator[Delta, None]:
        """Continue the prompt, with KV read from `handover` or, without one, computed here.

        The first delta is empty: it says that the handover is this engine's from now on, to be read
        or given up on every path, abort included. A turn of a conversation, or one whose output is
        read by others, ends with a handle, if its KV is kept. Raises BadRequest, EngineFailure or
        Unavailable.
        """
        if handover is not None and handover.request_id != request.request_id:
            raise EngineFailure(
                f"request {request.request_id} came with the handover of {handover.request_id}"
            )
        if handover is not None and handover.cache_salt is not None:
            request = msgspec.structs.replace(request, cache_salt=handover.cache_salt)
        pinned = {} if handover is None else self._pinned(handover)
        first = True
        order: dict[str, Any] = {}
        try:
            yield ADMITTED
            params = decode_sampling(request.sampling)
            # Blended KV is nobody's prefix: under its own salt no next turn would find it.
            is_blended = handover is not None and handover.cache_salt is not None
            kept_as = request.writes if is_blended else request.conversation or request.writes
            request = msgspec.structs.replace(request, conversation=kept_as)
            if self._keeping is not None:
                order = kept = self._keeping.order(request)
            else:
                kept = {}
            if handover is not None and request.n > 1:
                # vLLM gives each continuation the same handle, and a handle serves one read: read
                # the prompt once, then let all continuations hit this engine's own prefix cache.
                await self._pull(request, pinned)
            else:
                kept = {**pinned, **kept}
            if kept:
                params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": kept}
            generated: list[int] = []
            async with contextlib.aclosing(self._generate(request, params)) as outputs:
                async for output in outputs:
                    generated += (token for one in output.outputs for token in one.token_ids)
                    cached = output.num_cached_tokens or 0
                    delta = to_delta(
                        output,
                        cached_tokens=cached if handover is None else handover.cached_tokens,
                        first=first,
                    )
                    first = False
                    if delta.finished and self._keeping is not None:
                        handle = self._keeping.handle(
                            request,
                            generated,
                            output.kv_transfer_params,
                            None if handover is None else handover.replica,
                        )
                        delta = msgspec.structs.replace(delta, handle=handle)
                        if handle is None:
                            # A stop string is found here: the engine may have gone on to an end of
                            # its own before it heard of it, and kept what nobody would find.
                            self._keeping.cancel(order)
                        order = {}
                    yield delta
        except BaseException:
            # Before its first output the engine may not have taken the request at all. If it has,
            # it gives the handover up too, and the prefill engine ignores the second word.
            if handover is not None and first:
                with contextlib.suppress(Unavailable):
                    await self.release(handover)
            if self._keeping is not None:
                self._keeping.cancel(order)
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
        return self._keeping is not None and await self._keeping.hold(handle, reader, for_s)

    async def let_go(self, handle: Handle, reader: ReaderId) -> None:
        """The reader is done, whichever way. Raises Unavailable."""
        if self._keeping is not None:
            await self._keeping.let_go(handle, reader)

    async def forget(self, conversation: ConversationKey) -> bool:
        """Free what is kept for a conversation. Says whether anything was. Raises Unavailable."""
        return self._keeping is not None and await self._keeping.forget(conversation)

    async def end_lease(self, lease: LeaseId) -> None:
        """Free what one lease keeps, if it has not ended yet. Raises Unavailable."""
        if self._keeping is not None:
            await self._keeping.end(lease)

    async def lease_counts(self) -> LeaseCounts:
        """The leases right now; also has the engine free what has ended. Raises Unavailable."""
        if self._keeping is None:
            return LeaseCounts(live={}, blocks=0, held=0, unfreed=0, ends={})
        return await self._keeping.counts()

    async def drain(self) -> None:
        """Wait until nobody reads from this engine any more; at most as long as anybody may.

        Raises Unavailable.
        """
        may_read_s = (
            self._lease_s if self.role == "prefill" else self.reading.settings.read_patience_s
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(may_read_s):
                while await self._is_read():  # noqa: ASYNC110 - another process's word
                    await asyncio.sleep(_DRAIN_LOOKS_UP_S)

    async def _is_read(self) -> bool:
        """Whether anybody reads from this engine, or has been promised to."""
        if self.role == "prefill":
            await self.check_health()
            return self._gauges.kv_usage > 0  # all that is used is pinned: nothing else is left
        return (await self.lease_counts()).held > 0

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
            leases=0 if self._keeping is None else self._keeping.turns,
            why_no_passes=self._passes.known_why,
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
        # vLLM shuts down once more when collected, too late at interpreter exit.
        del self._llm, self._passes, self._members, self._outputs, self._foreseeing
        if self._keeping is not None:
            self._keeping.close()
        self._port.release()
        self._ucx_log.close()

    async def _wake(self) -> None:
        """Have the engine take one step, in which it frees what has ended."""
        try:
            await self._llm.notify_kv_transfer_request_rejected(f"wake-{uuid.uuid4().hex}", {})
        except EngineDeadError as error:
            raise Unavailable(f"{self.replica}: the engine has died") from error

    @staticmethod
    def _pinned(handover: Handover) -> dict[str, Any]:
        """The KV transfer parameters with which this engine reads `handover`, just received."""
        # Whoever sent it has not waited longer than for the first half.
        return {**handover.kv, PINNED_UNTIL: time.monotonic() + handover.lease_s / 2}

    async def _pull(self, request: GenerateRequest, pinned: dict[str, Any]) -> None:
        """Read a handed-over prompt into this engine's prefix cache."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": pinned},
        )
        async for _ in self._generate(request, params):
            pass

    def _generate(
        self, request: GenerateRequest, params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        return generate(self._llm, self.replica, request, params)
