"""The application: the one place that turns plain classes into Ray Serve deployments.

serve run clusters/local.yaml ─► build(args) ─► Ingress ──┬─► RoundCoordinator × N ──┐
                                                          ├──────────────────────────┤
                                                          │    PrefillReplica × P ◄──┤
                                                          │    DecodeReplica × D  ◄──┘
                                                          └─► KVDirectory ◄── registered by both
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from ray import serve
from ray.serve import metrics as ray_metrics
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from td_serve.config import (
    CoordinatorSettings,
    DeploymentConfig,
    DispatchSettings,
    EngineReplicaConfig,
    ReplicaConfig,
    decode,
)
from td_serve.coordinator import RoundCoordinator as Coordinator
from td_serve.directory import KVDirectory as Directory
from td_serve.dispatch import Dispatcher
from td_serve.errors import EngineFailure, ReplicaLost
from td_serve.handles import Keeper
from td_serve.metrics import Meter, Metrics
from td_serve.models.resolve import resolve
from td_serve.serve.calls import ask, returning_refusals, stream
from td_serve.serve.engines import RayEngines
from td_serve.serve.http import make_http_app
from td_serve.serve.remotes import RemoteDirectory, RemoteKeeper
from td_serve.serve.replicas import EngineReplica
from td_serve.serve.routing import AffinityRouter, replica_name
from td_serve.serve.settings import changed
from td_serve.tenants import Tenants
from td_serve.types import (
    ConversationKey,
    Delta,
    GenerateRequest,
    Handle,
    LeaseId,
    Membership,
    ReplicaState,
    RoundRecord,
    SessionId,
    pack,
    unpack,
)

DEPLOYMENTS = ("Ingress", "RoundCoordinator", "PrefillReplica", "DecodeReplica", "KVDirectory")
"""The deployments of an application, by name."""

USER_CONFIG: dict[str, type[msgspec.Struct]] = {
    "Ingress": DispatchSettings,
    "RoundCoordinator": CoordinatorSettings,
}
"""The deployments with live tunables, and what their `user_config` decodes to."""


def build(args: dict[str, Any]) -> serve.Application:
    """The Serve application for a cluster file's `args`. Raises ConfigError, ModelError."""
    config = decode(args, DeploymentConfig, path="args")
    config.check_engines("args")
    resolve(config.model)
    plain = msgspec.to_builtins(config)
    env = {"OMP_NUM_THREADS": str(config.frontend.cpu_threads), **config.env}
    directory = _deployment(KVDirectory, config.directory, env).bind()
    prefill_kind, decode_kind = (
        _deployment(
            kind,
            role,
            {**env, **config.engine_of(role, f"args.{name}").env},
            health_check_period_s=2.0,
            # Conversations go where their KV is.
            request_router_config=RequestRouterConfig(request_router_class=AffinityRouter),
        )
        for kind, role, name in (
            (PrefillReplica, config.prefill, "prefill"),
            (DecodeReplica, config.decode, "decode"),
        )
    )
    decode_ = decode_kind.bind(plain, directory)
    prefill = prefill_kind.bind(plain, directory, decode_)
    coordinator = _deployment(
        RoundCoordinator,
        config.coordinator,
        env,
        user_config=msgspec.to_builtins(CoordinatorSettings()),
        # A session lives on one coordinator: another one knows nothing of its rounds.
        request_router_config=RequestRouterConfig(
            request_router_class=_CONSISTENT_HASHING,
            request_router_kwargs={"num_fallback_replicas": 0},
        ),
    ).bind(prefill, decode_, directory)
    ingress = _deployment(
        serve.ingress()(Ingress),
        config.ingress,
        env,
        user_config=msgspec.to_builtins(DispatchSettings()),
    )
    return ingress.bind(plain, prefill, decode_, coordinator, directory)


_CONSISTENT_HASHING = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def _deployment(kind: Any, replica: ReplicaConfig, env: dict[str, str], **options: Any) -> Any:
    """A Serve deployment of a plain class, on the resources that the cluster file gives it."""
    if replica.autoscaling is None:
        options["num_replicas"] = replica.num_replicas
    else:
        options["autoscaling_config"] = msgspec.to_builtins(replica.autoscaling)
    return serve.deployment(
        name=kind.__name__,
        max_ongoing_requests=replica.max_ongoing_requests,
        graceful_shutdown_timeout_s=replica.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        # One line per call would drown everything else: there is a heartbeat every second.
        logging_config=LoggingConfig(enable_access_log=False),
        ray_actor_options={
            "num_cpus": replica.num_cpus,
            "num_gpus": replica.num_gpus,
            "resources": replica.resources,
            "runtime_env": {"env_vars": env},
        },
        **options,
    )(kind)


class KVDirectory:
    """The directory, as one replica: soft state, rebuilt by those who register."""

    def __init__(self) -> None:
        _log_to_stderr()
        self._directory = Directory()

    async def register(self, packed: bytes) -> bytes:
        return pack(self._directory.register(unpack(packed, ReplicaState)))

    async def keep(self, packed: bytes) -> None:
        self._directory.keep(unpack(packed, Handle))

    async def find(self, conversation: ConversationKey) -> bytes | None:
        handle = self._directory.find(conversation)
        return None if handle is None else pack(handle)

    async def drop(self, leases: list[tuple[ConversationKey, LeaseId]]) -> None:
        self._directory.drop(leases)

    async def replicas(self) -> list[bytes]:
        return [pack(state) for state in self._directory.replicas()]


@returning_refusals
class _EngineDeployment(EngineReplica):
    """Starts its engine in the constructor, so that it is routed to only when it can serve."""

    def __init__(
        self,
        role: Any,
        args: dict[str, Any],
        directory: DeploymentHandle,
        keeper: Keeper | None = None,
    ) -> None:
        # vLLM is imported here, in the replica's own process, after its environment is set.
        from td_serve.engine.host import EngineHost

        _log_to_stderr()
        config = decode(args, DeploymentConfig, path="args")
        replica: EngineReplicaConfig = getattr(config, role)
        host = EngineHost.start(
            role,
            resolve(config.model),
            config.engine_of(replica, f"args.{role}"),
            config.nixl,
            config.conversations,
            keeper,
            replica_name(role, serve.get_replica_context().replica_id.unique_id),
        )
        # Only the end of the process takes the replica out of every router at once.
        super().__init__(host, RemoteDirectory(directory), _metrics(), leave=lambda: os._exit(1))

    async def __del__(self) -> None:
        # Serve calls this, and awaits it, when the replica has answered all that it was asked.
        if hasattr(self, "_host"):
            await self.drain()
            self.close()


class PrefillReplica(_EngineDeployment):
    """A prefill engine. It asks decode replicas before it reads from them."""

    def __init__(
        self, args: dict[str, Any], directory: DeploymentHandle, decode_: DeploymentHandle
    ) -> None:
        super().__init__("prefill", args, directory, RemoteKeeper(decode_))


class DecodeReplica(_EngineDeployment):
    """A decode engine."""

    def __init__(self, args: dict[str, Any], directory: DeploymentHandle) -> None:
        super().__init__("decode", args, directory)


@returning_refusals
class RoundCoordinator:
    """The coordinator; requests come here by consistent hashing on their session."""

    def __init__(
        self, prefill: DeploymentHandle, decode_: DeploymentHandle, directory: DeploymentHandle
    ) -> None:
        _log_to_stderr()
        self._coordinator = Coordinator(
            RayEngines(prefill, decode_, directory), CoordinatorSettings(), _metrics()
        )
        self._is_running = False

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        place = "RoundCoordinator.user_config"
        settings = changed(user_config, CoordinatorSettings, place, self._is_running)
        if settings is not None:
            self._coordinator.configure(settings)
        self._is_running = True

    async def play(self, packed: bytes) -> AsyncGenerator[bytes, None]:
        self._is_running = True  # with settings or without
        deltas = self._coordinator.play(unpack(packed, GenerateRequest))
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                yield pack(delta)

    async def record(self, sim: SessionId, number: int, patience_s: float) -> bytes:
        return pack(await self._coordinator.record(sim, number, patience_s))

    async def forget(self, sim: SessionId) -> bool:
        return self._coordinator.forget(sim)

    async def excuse(self, packed: bytes) -> None:
        self._coordinator.excuse(unpack(packed, Membership))


class _RemoteCoordinator:
    """The coordinators behind one handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    def play(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        assert request.membership is not None
        handle = self._handle.options(session_id=request.membership.sim)
        return stream(handle.play, Delta, pack(request))

    async def record(self, sim: SessionId, number: int, patience_s: float) -> RoundRecord:
        handle = self._handle.options(session_id=sim)
        return unpack(await ask(handle.record, sim, number, patience_s), RoundRecord)

    async def forget(self, sim: SessionId) -> bool:
        return bool(await ask(self._handle.options(session_id=sim).forget, sim))

    async def excuse(self, membership: Membership) -> None:
        await ask(self._handle.options(session_id=membership.sim).excuse, pack(membership))


class Ingress:
    """HTTP in, requests out: members of rounds to the coordinator, the others straight on."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        args: dict[str, Any],
        prefill: DeploymentHandle,
        decode_: DeploymentHandle,
        coordinator: DeploymentHandle,
        directory: DeploymentHandle,
    ) -> None:
        from td_serve.engine.openai import OpenAIFrontend

        _log_to_stderr()
        config = decode(args, DeploymentConfig, path="args")
        self._tenants = Tenants(config.tenants)
        self._coordinator = _RemoteCoordinator(coordinator)
        self._directory = RemoteDirectory(directory)
        self._kept = RemoteKeeper(decode_)
        self._dispatcher = Dispatcher(
            RayEngines(prefill, decode_, directory), DispatchSettings(), _metrics()
        )
        self._is_running = False
        self._frontend = await OpenAIFrontend.start(
            resolve(config.model),
            config.narrowest_engine(),
            config.frontend,
            config.frontend.served_model_name or config.model,
            self._serve,
        )

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        place = "Ingress.user_config"
        settings = changed(user_config, DispatchSettings, place, self._is_running)
        if settings is not None:
            self._dispatcher.settings = settings
        self._is_running = True

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_http_app(
            self._frontend, self._coordinator, self._directory, self._kept, self._tenants
        )

    def _serve(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self._is_running = True  # with settings or without
        if request.membership is not None:
            return self._play(request)
        return self._dispatcher.generate(request)

    async def _play(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Have a member served; if its coordinator dies before it has output, by the next one."""
        delivered = False
        for attempts_left in reversed(range(self._dispatcher.settings.attempts)):
            try:
                async with contextlib.aclosing(self._coordinator.play(request)) as deltas:
                    async for delta in deltas:
                        delivered = True
                        yield delta
                return
            except ReplicaLost as error:
                if delivered:
                    raise EngineFailure(
                        f"request {request.request_id} broke off in mid-answer: {error.message}"
                    ) from error
                if not attempts_left:
                    raise


def _metrics() -> Metrics:
    """Instruments of Ray's exporter."""

    def histogram(name: str, text: str, bounds: Sequence[float]) -> Any:
        return ray_metrics.Histogram(name, description=text, boundaries=list(bounds))

    return Metrics(
        Meter(
            counter=lambda name, text: ray_metrics.Counter(name, description=text),
            histogram=histogram,
            gauge=lambda name, text: ray_metrics.Gauge(name, description=text),
        )
    )


def _log_to_stderr() -> None:
    """Our log lines go where Serve's go: the replica's own log, through its stderr."""
    logger = logging.getLogger("td_serve")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
