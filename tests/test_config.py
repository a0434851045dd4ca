"""Configuration: strict at any depth; an error says where, what stood there and what would do."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from td_serve.config import (
    AutoscalingConfig,
    CoordinatorSettings,
    DeploymentConfig,
    DispatchSettings,
    EngineConfig,
    EngineReplicaConfig,
    FrontendConfig,
    NixlConfig,
    ReplicaConfig,
    decode,
)
from td_serve.errors import ConfigError
from td_serve.strict import unknown_keys

Path = tuple[str, ...]

whole = {
    **msgspec.to_builtins(DeploymentConfig(model="m")),
    "ingress": msgspec.to_builtins(ReplicaConfig(autoscaling=AutoscalingConfig())),
    "prefill": msgspec.to_builtins(EngineReplicaConfig(autoscaling=AutoscalingConfig())),
}
"""A deployment in plain data with every struct present."""

FREE = (
    {("env",), ("tenants",), ("engine", "env"), ("engine", "extra"), ("nixl", "env")}
    | {(role, name) for role in ("ingress", "coordinator", "directory") for name in ("resources",)}
    | {(role, name) for role in ("prefill", "decode") for name in ("resources", "engine")}
)
"""Maps whose keys are not ours: the environment's, vLLM's, Ray's, and names of tenants. A role's
`engine` is checked by `engine_of`, where it meets the deployment's."""


def tables(value: object, path: Path = ()) -> Iterator[Path]:
    """The paths of all mappings in `value` whose keys are ours."""
    if isinstance(value, dict) and path not in FREE:
        yield path
        for key, item in value.items():
            yield from tables(item, (*path, key))


def at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


def copy() -> Any:
    return msgspec.json.decode(msgspec.json.encode(whole))


def dotted(*path: str) -> str:
    return ".".join(("args", *path))


def refusal(value: object, kind: type[msgspec.Struct] = DeploymentConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        decode(value, kind, path="args")
    return str(caught.value)


def test_every_table_of_a_deployment_is_covered_here() -> None:
    assert {(), ("engine",), ("nixl",), ("frontend",), ("ingress", "autoscaling")} <= set(
        tables(whole)
    )
    assert msgspec.to_builtins(decode(copy(), DeploymentConfig, path="args")) == whole


@pytest.mark.parametrize("path", list(tables(whole)), ids=lambda path: dotted(*path))
def test_an_unknown_key_is_refused_with_its_path_and_the_nearest_name(path: Path) -> None:
    for name in at(whole, path):
        if name == "model":
            continue  # taking it away is another fault
        value = copy()
        table = at(value, path)
        misspelt = name[:-1] + "xx"
        table[misspelt] = table.pop(name)
        message = refusal(value)
        assert message.startswith(f"{dotted(*path, misspelt)}: unknown key {misspelt!r}, ")
        assert f"did you mean {name!r}?" in message or len(name) <= 4


@pytest.mark.parametrize("path", list(tables(whole)), ids=lambda path: dotted(*path))
def test_a_key_like_no_other_is_refused_with_all_valid_names(path: Path) -> None:
    value = copy()
    at(value, path)["zzzzzz"] = 1
    message = refusal(value)
    assert message.startswith(f"{dotted(*path, 'zzzzzz')}: unknown key 'zzzzzz', valid keys are ")
    assert message.endswith(", ".join(sorted(at(whole, path))))


@pytest.mark.parametrize("path", list(tables(whole)), ids=lambda path: dotted(*path))
def test_a_wrong_type_is_refused_with_path_and_value(path: Path) -> None:
    wrong = [{"odd": "one"}, "odd one", ["odd", "one"]]
    for name, right in at(whole, path).items():
        value = copy()
        odd = next(o for o in wrong if not isinstance(o, type(right)) and (right or o != "odd one"))
        if right is None:
            odd = ["odd", "one"]
        at(value, path)[name] = odd
        message = refusal(value)
        assert message.startswith(f"{dotted(*path, name)}: Expected ")
        # What stands among tenants could be a key.
        assert message.endswith(f"got {odd!r}") or name == "tenants"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"model": 1}, "args.model: Expected `str`, got `int`, got 1"),
        ({}, "args: Object missing required field `model`, got {}"),
        ("x", "args: Expected `object`, got `str`, got 'x'"),
        ({"model": "m", "engine": None}, "args.engine: Expected `object`, got `null`, got None"),
        (
            {"model": "m", "engine": {"seed": -1}},
            "args.engine.seed: Expected `int` >= 0, got -1",
        ),
        (
            {"model": "m", "nixl": {"port_range": [20000, 70000]}},
            "args.nixl.port_range[1]: Expected `int` <= 65535, got 70000",
        ),
        (
            {"model": "m", "nixl": {"port_range": [20000]}},
            "args.nixl.port_range: Expected `array` of length 2, got 1, got [20000]",
        ),
        (
            {"model": "m", "nixl": {"require_transports": ["tcp", 3]}},
            "args.nixl.require_transports[1]: Expected `str`, got `int`, got 3",
        ),
        ({"model": "m", "env": {"A": 1}}, "args.env[...]: Expected `str`, got `int`"),
        (
            {"model": "m", "env": {1: "a"}},
            "args.env: a name: Expected `str`, got `int`, got 1 (quote it)",
        ),
        (
            {"model": "m", "ingress": {"autoscaling": {"max_replicas": 0}}},
            "args.ingress.autoscaling.max_replicas: Expected `int` >= 1, got 0",
        ),
    ],
)
def test_faults_are_told_in_full(value: object, expected: str) -> None:
    assert refusal(value) == expected


@pytest.mark.parametrize("kind", [CoordinatorSettings, DispatchSettings])
def test_live_tunables_are_as_strict(kind: type[msgspec.Struct]) -> None:
    assert "args.deadlin_ms: unknown key 'deadlin_ms'" in refusal({"deadlin_ms": 1}, kind)
    assert decode({}, kind, path="args") == kind()


def test_tunables_within_tunables_are_checked() -> None:
    message = refusal({"dispatch": {"attempt": 2}}, CoordinatorSettings)
    assert message == "args.dispatch.attempt: unknown key 'attempt', did you mean 'attempts'?"


def test_all_unknown_keys_can_be_listed() -> None:
    value = {"model": "m", "a": 1, "engine": {"b": 2}, "prefill": {"autoscaling": {"c": 3}}}
    found = [path for path, _, _ in unknown_keys(value, DeploymentConfig, "args")]
    assert found == ["args.a", "args.engine.b", "args.prefill.autoscaling.c"]


# ------------------------------------------------------------------------------------ engine_of


def test_a_role_overrides_single_fields_of_the_engine() -> None:
    config = decode(
        {
            "model": "m",
            "engine": {"dtype": "float32", "max_model_len": 100, "seed": 7},
            "prefill": {"engine": {"max_model_len": 200}},
        },
        DeploymentConfig,
        path="args",
    )
    assert config.engine_of(config.prefill, "args.prefill") == EngineConfig(
        dtype="float32", max_model_len=200, seed=7
    )
    assert config.engine_of(config.decode, "args.decode") == config.engine


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            {"block": 1},
            "args.decode.engine.block: unknown key 'block', did you mean 'block_size'?",
        ),
        ({"seed": "7"}, "args.decode.engine.seed: Expected `int`, got `str`, got '7'"),
        ({"block_size": 0}, "args.decode.engine.block_size: Expected `int` >= 1, got 0"),
    ],
)
def test_a_roles_overrides_are_checked_under_their_own_path(
    override: dict[str, Any], expected: str
) -> None:
    config = DeploymentConfig(model="m", decode=EngineReplicaConfig(engine=override))
    with pytest.raises(ConfigError) as caught:
        config.engine_of(config.decode, "args.decode")
    assert str(caught.value) == expected


# ------------------------------------------------------------------------------------ round trip

words = st.text(max_size=6)
positive = st.integers(1, 2**31)
seconds = st.floats(0.001, 1e6)
env = st.dictionaries(words, words, max_size=2)
resources = st.dictionaries(words, st.floats(0, 1e3), max_size=2)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


engine_fields: dict[str, st.SearchStrategy[Any]] = {
    "dtype": words,
    "max_model_len": maybe(positive),
    "block_size": positive,
    "kv_cache_gib": maybe(seconds),
    "max_num_seqs": maybe(positive),
    "max_num_batched_tokens": maybe(positive),
    "tensor_parallel_size": positive,
    "enforce_eager": st.booleans(),
    "enable_prefix_caching": st.booleans(),
    "seed": st.integers(0, 2**31),
    "extra": st.dictionaries(words, st.integers() | words, max_size=2),
    "env": env,
}
overrides = st.fixed_dictionaries({}, optional=engine_fields)
scaling = st.builds(
    AutoscalingConfig,
    min_replicas=st.integers(0, 9),
    max_replicas=st.integers(9, 99),
    target_ongoing_requests=seconds,
    upscale_delay_s=seconds,
    downscale_delay_s=seconds,
)
replica_fields: dict[str, st.SearchStrategy[Any]] = {
    "num_replicas": positive,
    "autoscaling": maybe(scaling),
    "num_cpus": st.floats(0, 64),
    "num_gpus": st.floats(0, 8),
    "resources": resources,
    "max_ongoing_requests": positive,
    "drain_timeout_s": seconds,
}
replicas = st.builds(ReplicaConfig, **replica_fields)
engine_replicas = st.builds(EngineReplicaConfig, engine=overrides, **replica_fields)
ports = st.integers(1024, 65535)


def without_repeats(tenants: dict[str, list[int]]) -> dict[str, list[str]]:
    """Digests of these numbers, each number once, and only tenants that have any left."""
    seen: set[int] = set()
    kept: dict[str, list[str]] = {}
    for name, numbers in tenants.items():
        new = sorted(set(numbers) - seen)
        seen |= set(new)
        if new:
            kept[name] = [f"{number:064x}" for number in new]
    return kept


configs = st.builds(
    DeploymentConfig,
    model=words,
    name=words,
    engine=st.builds(EngineConfig, **engine_fields),
    nixl=st.builds(
        NixlConfig,
        backend=words,
        host=maybe(words),
        port_range=st.tuples(ports, ports),
        env=env,
        require_transports=st.lists(words, max_size=2),
        lease_s=st.integers(6, 3600),
        progress_delay_us=st.integers(0, 10**6),
    ),
    frontend=st.builds(
        FrontendConfig,
        served_model_name=maybe(words),
        separator_as=words,
        chat_template=maybe(words),
        enable_auto_tool_choice=st.booleans(),
        cpu_threads=positive,
    ),
    ingress=replicas,
    coordinator=st.builds(ReplicaConfig, **{**replica_fields, "autoscaling": st.none()}),
    directory=st.builds(
        ReplicaConfig,
        **{**replica_fields, "autoscaling": st.none(), "num_replicas": st.just(1)},
    ),
    prefill=engine_replicas,
    decode=engine_replicas,
    env=env,
    tenants=st.dictionaries(
        st.text(min_size=1, max_size=6),
        st.lists(st.integers(0, 2**256 - 1), min_size=1, max_size=3),
        max_size=3,
    ).map(without_repeats),
)
tunables = st.builds(
    CoordinatorSettings,
    deadline_ms=positive,
    max_deadline_ms=positive,
    implicit_window_ms=positive,
    rounds_kept=positive,
    sessions_kept=positive,
    dispatch=st.builds(DispatchSettings, attempts=positive, retry_backoff_s=st.floats(0, 1e6)),
)


@settings(max_examples=50, deadline=None)
@given(configs | tunables)
def test_plain_data_decodes_to_what_it_came_from(config: msgspec.Struct) -> None:
    assert decode(msgspec.to_builtins(config), type(config), path="args") == config


@settings(max_examples=50, deadline=None)
@given(configs)
def test_a_roles_engine_is_the_deployments_but_for_its_overrides(config: DeploymentConfig) -> None:
    merged = msgspec.to_builtins(config.engine_of(config.prefill, "args.prefill"))
    base = msgspec.to_builtins(config.engine)
    override = config.prefill.engine
    maps = {name: {**base[name], **override.get(name, {})} for name in ("env", "extra")}
    assert merged == {**base, **override, **maps}


def test_scaling_between_bounds_that_cross_is_refused() -> None:
    data = {"model": "m", "decode": {"autoscaling": {"min_replicas": 3, "max_replicas": 2}}}
    with pytest.raises(ConfigError, match=r"args\.decode\.autoscaling: .* got 3 and 2"):
        decode(data, DeploymentConfig, path="args")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"directory": {"num_replicas": 2}}, "Expected one replica of `directory`"),
        ({"directory": {"autoscaling": {}}}, "Expected one replica of `directory`"),
        ({"coordinator": {"autoscaling": {}}}, "Expected no autoscaling of `coordinator`"),
    ],
)
def test_what_would_break_a_deployment_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        decode({"model": "m", **change}, DeploymentConfig, path="args")


@pytest.mark.parametrize(
    ("name", "values"),
    [("tensor_parallel_size", (2, 1)), ("block_size", (32, 64)), ("dtype", ("float32", "auto"))],
)
def test_engines_that_read_each_other_are_alike(name: str, values: tuple[object, object]) -> None:
    args = {
        "model": "m",
        "engine": {name: values[0]},
        "decode": {"engine": {name: values[1]}},
    }
    expected = rf"args\.decode\.engine\.{name}: {values[1]!r}, but prefill's is {values[0]!r}"
    with pytest.raises(ConfigError, match=expected):
        decode(args, DeploymentConfig, path="args").check_engines("args")
    one_way = {**args, "conversations": {"bidirectional_kv_xfer": False}}
    decode(one_way, DeploymentConfig, path="args").check_engines("args")


@pytest.mark.parametrize("wrong", [-1, "often", 1.5])
def test_a_threshold_is_a_number_or_auto(wrong: object) -> None:
    args = {"model": "m", "conversations": {"kv_recompute_threshold": wrong}}
    with pytest.raises(ConfigError, match=r"args\.conversations\.kv_recompute_threshold"):
        decode(args, DeploymentConfig, path="args")


# ------------------------------------------------------------------------------------ tenants

ONE, TWO = "0a" * 32, "1b" * 32
SHA = "expected the SHA-256 of an API key: 64 lower-case hexadecimal digits"


def test_tenants_and_their_keys() -> None:
    tenants = {"acme": [ONE], "t" * 128: [TWO]}
    config = decode({"model": "m", "tenants": tenants}, DeploymentConfig, path="args")
    assert config.tenants == tenants
    assert DeploymentConfig(model="m").tenants == {}


@pytest.mark.parametrize(
    ("tenants", "expected"),
    [
        ({"": [ONE]}, ".tenants: a name of 0 characters, '', expected 1 to 128"),
        (
            {"t" * 129: [ONE]},
            f".tenants: a name of 129 characters, {'t' * 129!r}, expected 1 to 128",
        ),
        (
            {"\ud800": [ONE]},
            ".tenants: the name '\\ud800', expected whole characters, no surrogates",
        ),
        ({"a": []}, ".tenants.a: [], expected the SHA-256 of at least one API key"),
        ({"a": [ONE], "b": [TWO, ONE[1:]]}, f".tenants.b[1]: 63 characters, {SHA}"),
        ({"a": [ONE + "\n"]}, f".tenants.a[0]: 65 characters, {SHA}"),
        ({"a": [ONE.upper()]}, f".tenants.a[0]: 64 characters, {SHA}"),
        ({"a": ["g" * 64]}, f".tenants.a[0]: 64 characters, {SHA}"),
        (
            {"a": [TWO, ONE], "b": [ONE]},
            f".tenants.b[0]: '{ONE}', which stands at tenants.a[1] too, expected once",
        ),
        (
            {"a": [ONE, ONE]},
            f".tenants.a[1]: '{ONE}', which stands at tenants.a[0] too, expected once",
        ),
        ({"a": ONE}, ".tenants[...]: Expected `array`, got `str`"),
        ({"a": [1]}, ".tenants[...][0]: Expected `str`, got `int`"),
    ],
)
def test_wrong_tenants_are_refused_with_the_place(tenants: object, expected: str) -> None:
    assert refusal({"model": "m", "tenants": tenants}) == f"args{expected}"


@pytest.mark.parametrize("tenants", [{"a": ["td-secret"]}, {"a": "td-secret"}])
def test_a_key_in_a_digests_place_is_not_shown(tenants: object) -> None:
    assert "secret" not in refusal({"model": "m", "tenants": tenants})


@pytest.mark.parametrize(
    "tenants",
    [
        {7: ["td-secret"], "bolt": ["td-secret"]},
        {"acme": "td-secret"},
        {"acme": ["td-secret"]},
        "td-secret",
        ["td-secret"],
    ],
)
def test_no_error_shows_what_may_be_a_key(tenants: object) -> None:
    with pytest.raises(ConfigError, match=r"args\.tenants") as caught:
        decode({"model": "m", "tenants": tenants}, DeploymentConfig, path="args")
    assert "secret" not in str(caught.value)


def test_a_wrong_choice_is_told_the_right_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        decode({"reuse": {"rule": "hkdv"}}, CoordinatorSettings, path="user_config")
    assert str(caught.value) == (
        "user_config.reuse.rule: 'hkdv', did you mean 'hkvd'? expected one of full, none, first_k, "
        "first_pages, hkvd, first_k+hkvd, first_pages+hkvd"
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"reuse": {"left": "1e-3"}}, "got '1e-3', which is text: write 0.001"),
        ({"reuse": {"mode": False}}, "False, expected one of exact, blend"),
        ({"reuse": {"k": 2**70}}, "got 1180591620717411303424"),
        ({"reuse": {"left": float("inf")}}, "got inf"),
        ({"reuse": {"left": float("nan")}}, "got nan"),
    ],
)
def test_what_can_never_work_is_refused(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(value, CoordinatorSettings, path="user_config")
    assert message in str(caught.value)
