"""What a deployment is made of: frozen structs decoded from a cluster file's `args`.

`DeploymentConfig` is the typed argument of the application builder (`td_serve.serve.app:build`).
What may change while the deployment runs stands apart, in `CoordinatorSettings` and
`DispatchSettings`: those travel as `user_config` and take effect without a restart.

Every decode is strict: an unknown key, a wrong type or a value out of bounds raises ConfigError
with the key's path, what stood there and the nearest valid name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from td_serve import strict
from td_serve.errors import ConfigError
from td_serve.strict import Fault
from td_serve.types import Rule, RuleName

# Upper bounds are there for what no machine has: infinity, and numbers that no wire carries.
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Gibibytes = Annotated[float, msgspec.Meta(ge=2**-10, le=2**20)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Port = Annotated[int, msgspec.Meta(ge=1024, le=65535)]


_PLACE_BELOW = re.compile(r"fs:///[^,?#]+$|rediss?://[^/]+")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LONGEST_TENANT = 128


class _Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the config structs."""


class EngineConfig(_Config, frozen=True, kw_only=True):
    """A vLLM engine, prefill or decode.

    `kv_cache_gib` is the KV pool's size (GiB); None leaves it to vLLM's memory profiling.
    `block_size` is in tokens; CPU kernels want a multiple of 32. `grammar_backend` compiles the
    grammars of structured outputs, of all requests the same one. `pass_store_gib` is what a prefill
    engine may keep for rounds that are blended: shared text and histories, as much again for the
    members of passes until they have loaded theirs, and a quarter of it for a pass under way. In
    histories `pass_store_diffs` says how what was computed anew of shared texts is kept,
    `pass_store_private` what is an agent's own: `lossless`, or as what it differs by, or itself, in
    numbers of 8 or 4 bits (`td-serve bench storage` says what they save and what they cost).
    `pass_store_below` are places where all of that is kept once more, for when there is no room for
    it, and for an engine that is started anew: URLs, the fastest first, of folders (`fs:///path`,
    each of up to `pass_store_folder_gib`) and Redis servers (`redis://host:port`).
    `extra` holds further engine arguments under vLLM's own names, `env` further environment
    variables of the engine's process.
    """

    dtype: str = "auto"
    max_model_len: Positive | None = None
    block_size: Positive = 32
    kv_cache_gib: Gibibytes | None = None
    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    tensor_parallel_size: Positive = 1
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    seed: NonNegative = 0
    grammar_backend: Literal["xgrammar", "guidance"] = "xgrammar"
    pass_store_gib: Gibibytes = 1.0
    pass_store_diffs: Literal["lossless", "int8", "int4"] = "lossless"
    pass_store_private: Literal["lossless", "int8"] = "lossless"
    pass_store_below: list[str] = []
    pass_store_folder_gib: Gibibytes = 20.0
    extra: dict[str, Any] = {}
    env: dict[str, str] = {}

    def __post_init__(self) -> None:
        for number, url in enumerate(self.pass_store_below):
            if not _PLACE_BELOW.match(url):
                raise Fault(
                    f".pass_store_below[{number}]",
                    f"{url!r}, expected fs:///path or redis://host:port",
                )
        if self.pass_store_below and self.tensor_parallel_size > 1:
            raise Fault(
                ".pass_store_below",
                f"{len(self.pass_store_below)} places, expected none with a tensor_parallel_size "
                f"of {self.tensor_parallel_size}: ranks would not find the same",
            )


class NixlConfig(_Config, frozen=True, kw_only=True):
    """How KV moves between engines.

    `require_transports` lists the UCX transports (`tcp`, `cma`, `srd`, …) of which an engine's own
    NIXL agent must report every one at start-up: UCX falls back to slower ones silently, and then
    the replica refuses to start. `host` is the address that peers connect to; None means the
    machine's own. `port_range` is where replicas that share a host take their side-channel ports
    from, first and last port. `lease_s` ends a prefill engine's pin on blocks nobody reads; it is
    renewed every sixth of it, in whole seconds, while they are waited for.
    `progress_delay_us` is how long NIXL's progress thread may sleep when nothing arrives; 0 makes
    it poll without rest, on a core of its own.
    """

    backend: str = "UCX"
    host: str | None = None
    port_range: tuple[Port, Port] = (20500, 21499)
    env: dict[str, str] = {}
    require_transports: list[str] = []
    lease_s: Annotated[int, msgspec.Meta(ge=6)] = 30
    progress_delay_us: NonNegative = 1000


class ConversationConfig(_Config, frozen=True, kw_only=True):
    """How a conversation's next turn finds the KV of its last one.

    With `bidirectional_kv_xfer` a decode engine keeps a finished turn's blocks for
    `decoder_kv_blocks_ttl` seconds from the last use on, and a prefill engine reads them back,
    unless it would read fewer than `kv_recompute_threshold` tokens: those it computes. `auto` works
    the threshold out from prefill's measured rate, the transfer's, and what asking takes. A read
    must be over within `read_patience_s` of asking for it, or the tokens are computed after all.
    """

    bidirectional_kv_xfer: bool = True
    decoder_kv_blocks_ttl: Seconds = 480.0
    kv_recompute_threshold: NonNegative | Literal["auto"] = 64
    read_patience_s: Seconds = 5.0


class AutoscalingConfig(_Config, frozen=True, kw_only=True):
    """Replicas follow load: Ray Serve's own autoscaling, by requests in flight per replica."""

    min_replicas: NonNegative = 1
    max_replicas: Positive = 1
    target_ongoing_requests: Annotated[float, msgspec.Meta(gt=0)] = 8.0
    upscale_delay_s: Seconds = 10.0
    downscale_delay_s: Seconds = 300.0

    def __post_init__(self) -> None:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"Expected min_replicas <= max_replicas, got {self.min_replicas} and "
                f"{self.max_replicas}"
            )


class ReplicaConfig(_Config, frozen=True, kw_only=True):
    """One kind of replica: how many, on what resources, with how many requests in flight each.

    `max_ongoing_requests` bounds what Ray Serve sends to one replica at a time; more wait in the
    caller's queue. `drain_timeout_s` is how long a replica that must go may finish what it has.
    """

    num_replicas: Positive = 1
    autoscaling: AutoscalingConfig | None = None
    num_cpus: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    num_gpus: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    resources: dict[str, float] = {}
    max_ongoing_requests: Positive = 16_384
    drain_timeout_s: Seconds = 120.0


class EngineReplicaConfig(ReplicaConfig, frozen=True, kw_only=True):
    """Replicas that host an engine.

    `engine` overrides single fields of the deployment's own, and single keys of its maps.
    """

    engine: dict[str, Any] = {}


class FrontendConfig(_Config, frozen=True, kw_only=True):
    """The OpenAI side: names and parsers, under vLLM's own option names.

    `served_model_name` is what clients ask for; None means the name in `model`. `max_choices` is
    the most that `n` may ask for: they all take a slot of the decode engine. `separator_as` is the
    text that the model reads in place of `<TTSEP>`: none, or a token of its own. `cpu_threads`
    bounds the threads of torch in processes that host no engine.
    """

    served_model_name: str | None = None
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    enable_auto_tool_choice: bool = False
    max_choices: Positive = 128
    separator_as: str = ""
    cpu_threads: Positive = 1


class DispatchSettings(_Config, frozen=True, kw_only=True):
    """Live tunables of one request's way through prefill and decode.

    `attempts` counts the tries at a request that has not put out anything yet: each ends with an
    engine that failed. Waiting for a decode replica that is not there is no try; it may take up to
    `patience_s`.
    """

    attempts: Positive = 3
    patience_s: Seconds = 120.0
    retry_backoff_s: Annotated[float, msgspec.Meta(ge=0)] = 0.5


class ReuseSettings(_Config, frozen=True, kw_only=True):
    """How a round's prompts are prefilled.

    `exact` prefills each as it is. `blend` computes what members share once for all and takes it
    over with `rule`: answers are close to exact ones, not the same. What the rule chooses is
    computed anew for each: beginnings of `k` tokens or pages; with `hkvd` those whose KV deviates
    most after a share `depth` of the layers, in runs of `run` tokens, until the rest deviates by
    `left` or less on average (squared, of the keys' length; `weighed` by the square root of how
    much what is asked attends to a token there, of the mean of all); looked at for the whole round
    at once, or for each member by its `own`. A round that wants more than a share `ratio` of the
    shared tokens for that is prefilled exactly; with `left` 0 just that share is computed. The
    defaults of `left`, `ratio` and `depth` were chosen with SmolLM2-135M, which with them stays
    within .02 nats of exact answers on recorded rounds (`td-serve bench reuse --fidelity`): other
    models may want others.

    `base` says what that KV is that members take over: of the `canonical` sequence, in which all
    that they share is computed once; or the `author`'s, as the agent that put it out has decoded
    it, read from the decode replica that has kept it (it needs conversations'
    `bidirectional_kv_xfer`): a read in place of the computation, but it deviates more.

    `ahead` has what a round puts out computed for the next one before that comes, where a prefill
    replica has nothing else to do: as if its prompts were laid out like the last ones. With the
    `author`'s base it is not.
    """

    mode: Literal["exact", "blend"] = "exact"
    rule: Literal[
        "full", "none", "first_k", "first_pages", "hkvd", "first_k+hkvd", "first_pages+hkvd"
    ] = "hkvd"
    k: NonNegative = 2
    ratio: Share = 0.6
    left: NotNegative = 0.0015
    depth: Share = 0.2
    run: Positive = 1
    own: bool = False
    weighed: bool = True
    ahead: bool = True
    base: Literal["canonical", "author"] = "canonical"

    @property
    def reads_authors(self) -> bool:
        """Whether turns are kept for those who read what they have put out."""
        return self.mode == "blend" and self.base == "author"

    def as_rule(self) -> Rule:
        """The rule, for a plan."""
        return Rule(
            name=RuleName(self.rule),
            k=self.k,
            ratio=self.ratio,
            left=self.left,
            depth=self.depth,
            run=self.run,
            own=self.own,
            weighed=self.weighed,
        )


class CoordinatorSettings(_Config, frozen=True, kw_only=True):
    """Live tunables of rounds.

    `deadline_ms` is how long a round waits for its members, from the first one's arrival, when the
    request names no deadline; `max_deadline_ms` bounds what a request may name.
    `implicit_window_ms` is the same for the zero-change path, where the number of agents is not
    known. `rounds_kept` bounds the finished rounds a session remembers, `sessions_kept` the
    sessions (the least recently used go first, never one with a round under way).
    """

    deadline_ms: Positive = 10_000
    max_deadline_ms: Positive = 600_000
    implicit_window_ms: Positive = 100
    rounds_kept: Positive = 4
    sessions_kept: Positive = 10_000
    reuse: ReuseSettings = ReuseSettings()
    dispatch: DispatchSettings = DispatchSettings()


class DeploymentConfig(_Config, frozen=True, kw_only=True):
    """One application: a model, and the replicas that serve it.

    `tenants` are those who may use it: by name, the SHA-256 digests of the API keys of each
    (`td-serve key` makes both), so that a cluster file holds no secret. Without any, the server is
    open, and all its clients are one tenant.
    """

    model: str
    name: str = "td_serve"
    engine: EngineConfig = EngineConfig()
    nixl: NixlConfig = NixlConfig()
    conversations: ConversationConfig = ConversationConfig()
    frontend: FrontendConfig = FrontendConfig()
    ingress: ReplicaConfig = ReplicaConfig()
    coordinator: ReplicaConfig = ReplicaConfig()
    directory: ReplicaConfig = ReplicaConfig()
    prefill: EngineReplicaConfig = EngineReplicaConfig()
    decode: EngineReplicaConfig = EngineReplicaConfig()
    tenants: dict[str, list[str]] = {}
    env: dict[str, str] = {}
    """Environment variables of every replica."""

    def __post_init__(self) -> None:
        _check_tenants(self.tenants)
        if self.directory.num_replicas != 1 or self.directory.autoscaling is not None:
            raise ValueError("Expected one replica of `directory`: replicas register with one")
        if self.coordinator.autoscaling is not None:
            raise ValueError(
                "Expected no autoscaling of `coordinator`: sessions would move in mid-round"
            )

    def narrowest_engine(self) -> EngineConfig:
        """The deployment's engine, with the window that every role's engine has."""
        windows = [
            window
            for role, path in ((self.prefill, "args.prefill"), (self.decode, "args.decode"))
            if (window := self.engine_of(role, path).max_model_len) is not None
        ]
        return msgspec.structs.replace(self.engine, max_model_len=min(windows, default=None))

    def check_engines(self, path: str) -> None:
        """Both roles' engines are right, and can read each other's KV if they shall.

        `path` is the place of this in the file. Raises ConfigError.
        """
        prefill = self.engine_of(self.prefill, f"{path}.prefill")
        decode = self.engine_of(self.decode, f"{path}.decode")
        if not self.conversations.bidirectional_kv_xfer:
            return
        for name in ("tensor_parallel_size", "block_size", "dtype"):
            ours, theirs = getattr(prefill, name), getattr(decode, name)
            if ours != theirs:
                raise ConfigError(
                    f"{path}.decode.engine.{name}: {theirs!r}, but prefill's is {ours!r}; expected "
                    "the same: prefill reads decode's KV as it is (unless "
                    f"{path}.conversations.bidirectional_kv_xfer is false)"
                )

    def engine_of(self, role: EngineReplicaConfig, path: str) -> EngineConfig:
        """The engine of one role: the deployment's, with the role's own fields on top.

        `path` is the role's place in the file, for errors.
        """
        base = msgspec.to_builtins(self.engine)
        merged = {**base, **role.engine}
        for name in ("extra", "env"):
            if isinstance(own := role.engine.get(name), Mapping):
                merged[name] = {**base[name], **own}
        return decode(merged, EngineConfig, path=f"{path}.engine")


def _check_tenants(tenants: Mapping[str, list[str]]) -> None:
    """Every tenant has a name and keys, and no key is of two. Raises ValueError."""
    places: dict[str, str] = {}
    for name, digests in tenants.items():
        _check_name(name)
        place = f".tenants.{name}"
        if not digests:
            raise Fault(place, "[], expected the SHA-256 of at least one API key")
        for number, digest in enumerate(digests):
            here = f"{place}[{number}]"
            if not _DIGEST.fullmatch(digest):
                # What stands there is not shown: it could be the key itself.
                raise Fault(
                    here,
                    f"{len(digest)} characters, expected the SHA-256 of an API key: 64 lower-case "
                    "hexadecimal digits",
                )
            if (other := places.setdefault(digest, here)) != here:
                raise Fault(here, f"{digest!r}, which stands at {other[1:]} too, expected once")


def _check_name(tenant: str) -> None:
    if not 1 <= len(tenant) <= _LONGEST_TENANT:
        raise Fault(
            ".tenants",
            f"a name of {len(tenant)} characters, {tenant!r}, expected 1 to {_LONGEST_TENANT}",
        )
    if any("\ud800" <= character <= "\udfff" for character in tenant):
        raise Fault(".tenants", f"the name {tenant!r}, expected whole characters, no surrogates")


T = TypeVar("T", bound=msgspec.Struct)


def decode(value: object, kind: type[T], *, path: str) -> T:
    """Decode plain data into `kind`, strictly. `path` names where the data stands, for errors.

    Raises ConfigError.
    """
    try:
        return strict.decode(value, kind, path=path, secret=".tenants")
    except strict.Wrong as error:
        raise ConfigError(str(error)) from None
