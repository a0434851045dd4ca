"""Cluster files: a slip of the pen anywhere is refused, with file, place and the nearest name."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pydantic
import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ray.serve.schema import ServeDeploySchema

from td_serve import config
from td_serve.cli import main
from td_serve.config import CoordinatorSettings, DispatchSettings
from td_serve.errors import ConfigError
from td_serve.serve.check import check_file

CLUSTERS = sorted((Path(__file__).parents[2] / "clusters").glob("*.yaml"))
Steps = tuple[str | int, ...]

FULL: dict[str, Any] = {
    "proxy_location": "EveryNode",
    "http_options": {"host": "0.0.0.0", "port": 8000, "request_timeout_s": 600.0},
    "logging_config": {"log_level": "INFO", "encoding": "TEXT"},
    "applications": [
        {
            "name": "td_serve",
            "route_prefix": "/",
            "import_path": "td_serve.serve.app:build",
            "runtime_env": {"env_vars": {"A": "1"}},
            "args": {
                "model": "smollm2-135m-instruct",
                "env": {"HF_HUB_OFFLINE": "1"},
                "tenants": {"acme": ["0a" * 32, "1b" * 32], "the mill": ["2c" * 32]},
                "engine": {
                    "max_model_len": 8192,
                    "extra": {"max_logprobs": 5},
                    "env": {"OMP_NUM_THREADS": "1"},
                },
                "nixl": {"host": "127.0.0.1", "env": {"UCX_TLS": "tcp"}},
                "frontend": {"cpu_threads": 1},
                "ingress": {"num_cpus": 1.0, "resources": {"edge": 1.0}},
                "prefill": {
                    "autoscaling": {"min_replicas": 1, "max_replicas": 2},
                    "engine": {"max_num_batched_tokens": 4096, "env": {"B": "2"}},
                },
                "decode": {"engine": {"max_num_seqs": 16}},
            },
            "deployments": [
                {
                    "name": "RoundCoordinator",
                    "user_config": {"deadline_ms": 5000, "dispatch": {"attempts": 2}},
                },
                {"name": "Ingress", "user_config": {"retry_backoff_s": 0.1}},
                {
                    "name": "PrefillReplica",
                    "max_ongoing_requests": 64,
                    "autoscaling_config": {"min_replicas": 1, "max_replicas": 4},
                    "ray_actor_options": {
                        "num_cpus": 2.0,
                        "resources": {"fast": 1.0},
                        "runtime_env": {"env_vars": {"C": "3"}},
                    },
                    "request_router_config": {"initial_backoff_s": 0.1},
                },
            ],
        },
        {"name": "other", "route_prefix": "/other", "import_path": "a.b:c", "args": {"any": 1}},
    ],
}
"""A valid file with a table of every kind in it."""

FREE_FORM = {"env", "extra", "resources", "runtime_env", "env_vars", "tenants"}
"""Maps whose keys are not ours to know: environments, vLLM's arguments (vLLM checks them when the
engine starts), Ray's custom resources and runtime environments, names of tenants. So are the `args`
of applications that are not td_serve's."""


def tables(value: Any, path: Steps = ()) -> Iterator[Steps]:
    """The paths of all mappings whose keys are checked."""
    if (path and path[-1] in FREE_FORM) or path == ("applications", 1, "args"):
        return
    if isinstance(value, dict):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, dict | list):
            yield from tables(item, (*path, key))


def at(value: Any, path: Steps) -> Any:
    for step in path:
        value = value[step]
    return value


def dotted(path: Steps) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.lstrip(".") or "top"


def known_names() -> set[str]:
    """Every key that is valid somewhere."""
    names: set[str] = set()
    kinds: list[Any] = [ServeDeploySchema]
    seen: set[int] = set()
    while kinds:
        kind = kinds.pop()
        kinds += get_args(kind)
        if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel) and id(kind) not in seen:
            seen.add(id(kind))
            names |= kind.model_fields.keys()
            kinds += [field.annotation for field in kind.model_fields.values()]
    for struct in vars(config).values():
        if isinstance(struct, type) and issubclass(struct, msgspec.Struct):
            names |= set(struct.__struct_fields__)
    return names


KNOWN = known_names()


class Files:
    """Writes cluster files and reads what is said of them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "cluster.yaml"

    def write(self, data: Any) -> Path:
        text = data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False)
        self.path.write_text(text, "utf-8")
        return self.path

    def refusal(self, data: Any) -> str:
        """What is said of a file that is refused, without the file's name in front."""
        with pytest.raises(ConfigError) as caught:
            check_file(self.write(data))
        prefix = f"{self.path}: "
        assert str(caught.value).startswith(prefix)
        return str(caught.value).removeprefix(prefix)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("clusters"))


# ------------------------------------------------------------------------------------ valid files


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_the_files_that_we_ship_are_right(path: Path) -> None:
    assert len(check_file(path).applications) == 1


def test_we_ship_files() -> None:
    assert CLUSTERS


def test_a_file_of_every_kind_of_table_is_right(files: Files) -> None:
    (decoded,) = check_file(files.write(FULL)).applications
    assert decoded.model == "smollm2-135m-instruct"
    assert decoded.engine_of(decoded.prefill, "prefill").max_num_batched_tokens == 4096


def test_a_file_without_applications_of_ours_has_none(files: Files) -> None:
    data = {**FULL, "applications": FULL["applications"][1:]}
    assert check_file(files.write(data)).applications == []
    assert check_file(files.write({"applications": []})).applications == []


def test_free_form_maps_take_any_key(files: Files) -> None:
    data = copy.deepcopy(FULL)
    app = data["applications"][0]
    for table in (
        app["runtime_env"],
        app["args"]["env"],
        app["args"]["engine"]["env"],
        app["args"]["engine"]["extra"],
        app["args"]["nixl"]["env"],
        app["args"]["prefill"]["engine"]["env"],
        app["deployments"][2]["ray_actor_options"]["runtime_env"],
        data["applications"][1]["args"],
    ):
        table["anything"] = "goes"
    assert len(check_file(files.write(data)).applications) == 1


# ------------------------------------------------------------------------------------ keys


@pytest.mark.parametrize(
    ("path", "name", "misspelt"),
    [
        ((), "http_options", "http_option"),
        (("http_options",), "port", "prt"),
        (("logging_config",), "log_level", "loglevel"),
        (("applications", 0), "route_prefix", "route_prefx"),
        (("applications", 1), "import_path", "importpath"),
        (("applications", 0, "args"), "frontend", "fronted"),
        (("applications", 0, "args", "engine"), "max_model_len", "max_model_length"),
        (("applications", 0, "args", "nixl"), "host", "hosts"),
        (("applications", 0, "args", "prefill"), "autoscaling", "auto_scaling"),
        (("applications", 0, "args", "prefill", "autoscaling"), "max_replicas", "max_replica"),
        (
            ("applications", 0, "args", "prefill", "engine"),
            "max_num_batched_tokens",
            "max_batched_tokens",
        ),
        (("applications", 0, "args", "decode", "engine"), "max_num_seqs", "max_seqs"),
        (("applications", 0, "deployments", 0), "user_config", "userconfig"),
        (("applications", 0, "deployments", 0, "user_config"), "deadline_ms", "deadline"),
        (
            ("applications", 0, "deployments", 0, "user_config", "dispatch"),
            "attempts",
            "attempt",
        ),
        (("applications", 0, "deployments", 1, "user_config"), "retry_backoff_s", "backoff_s"),
        (("applications", 0, "deployments", 2), "max_ongoing_requests", "max_ongoing_request"),
        (("applications", 0, "deployments", 2, "ray_actor_options"), "num_cpus", "num_cpu"),
        (
            ("applications", 0, "deployments", 2, "autoscaling_config"),
            "min_replicas",
            "min_replcas",
        ),
        (
            ("applications", 0, "deployments", 2, "request_router_config"),
            "initial_backoff_s",
            "initial_backof_s",
        ),
    ],
    ids=lambda part: dotted(part) if isinstance(part, tuple) else None,
)
def test_a_misspelt_key_is_told_with_its_place_and_the_nearest_name(
    files: Files, path: Steps, name: str, misspelt: str
) -> None:
    data = copy.deepcopy(FULL)
    table = at(data, path)
    table[misspelt] = table.pop(name)
    assert files.refusal(data) == (
        f"{dotted((*path, misspelt))}: unknown key {misspelt!r}, did you mean {name!r}?"
    )


mutations = st.sampled_from(
    [
        lambda name, at: name[:at] + name[at + 1 :],
        lambda name, at: name[:at] + "q" + name[at:],
        lambda name, at: name[:at] + "q" + name[at + 1 :],
        lambda name, at: name[:at] + name[at:].swapcase(),
        lambda name, at: name[at:] + name[:at],
        lambda name, at: name.replace("_", "-"),
        lambda name, at: f" {name}",
    ]
)
valid_files = [FULL, *(yaml.safe_load(path.read_text()) for path in CLUSTERS)]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_one_key_renamed_anywhere_is_always_refused(files: Files, data: st.DataObject) -> None:
    """Anywhere but in FREE_FORM maps."""
    cluster = copy.deepcopy(data.draw(st.sampled_from(valid_files)))
    path = data.draw(st.sampled_from(list(tables(cluster))))
    table = at(cluster, path)
    name = data.draw(st.sampled_from(sorted(table)))
    renamed = data.draw(mutations)(name, data.draw(st.integers(0, len(name) - 1)))
    assume(renamed not in KNOWN)
    table[renamed] = table.pop(name)
    message = files.refusal(cluster)
    assert repr(renamed) in message
    assert message.startswith(dotted((*path, renamed)))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_key_given_twice_anywhere_is_always_refused(files: Files, data: st.DataObject) -> None:
    """In free-form maps, too: YAML itself would keep the last one without a word."""
    lines = yaml.safe_dump(FULL, sort_keys=False, default_flow_style=False).splitlines()
    keys = [i for i, line in enumerate(lines) if line.rstrip()[-1:] != ":" and ": " in line]
    number = data.draw(st.sampled_from(keys))
    name = lines[number].strip().removeprefix("- ").split(":")[0]
    indent = len(lines[number]) - len(lines[number].lstrip(" -"))
    lines.insert(number + 1, f"{' ' * indent}{name}: again")
    message = files.refusal("\n".join(lines))
    assert f"key '{name}' given twice" in message
    assert f"line {number + 2}," in message


def test_a_table_given_twice_is_refused(files: Files) -> None:
    message = files.refusal("http_options: {port: 1}\napplications: []\nhttp_options: {}\n")
    assert "key 'http_options' given twice" in message
    assert "line 3, column 1" in message


def test_a_merged_table_may_be_overridden(files: Files) -> None:
    path = files.write(
        """
applications:
  - name: a
    import_path: td_serve.serve.app:build
    args:
      model: m
      prefill: &replica {num_replicas: 1, num_cpus: 2}
      decode:
        <<: *replica
        num_replicas: 3
"""
    )
    (decoded,) = check_file(path).applications
    assert (decoded.decode.num_replicas, decoded.decode.num_cpus) == (3, 2.0)


# ------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        (("http_options", "port"), "eighty", ["http_options.port: ", "'eighty'"]),
        (("applications",), None, ["applications: ", "None"]),
        (("applications", 0, "import_path"), 3, ["applications.0.import_path: ", "3"]),
        (("applications", 0, "args"), [1], ["applications.0.args: ", "[1]"]),
        (
            ("applications", 0, "args", "model"),
            7,
            ["applications[0].args.model: Expected `str`, got `int`, got 7"],
        ),
        (
            ("applications", 0, "args", "engine", "block_size"),
            "32",
            ["applications[0].args.engine.block_size: Expected `int`, got `str`, got '32'"],
        ),
        (
            ("applications", 0, "args", "prefill", "engine", "seed"),
            -1,
            ["applications[0].args.prefill.engine.seed: Expected `int` >= 0, got -1"],
        ),
        (
            ("applications", 0, "args", "decode", "engine", "dtype"),
            1,
            ["applications[0].args.decode.engine.dtype: Expected `str`, got `int`, got 1"],
        ),
        (
            ("applications", 0, "args", "tenants", "the mill"),
            ["2C" * 32],
            ["applications[0].args.tenants.the mill[0]: 64 characters, expected the SHA-256"],
        ),
        (
            ("applications", 0, "args", "tenants", "the mill"),
            ["1b" * 32],
            [f"applications[0].args.tenants.the mill[0]: '{'1b' * 32}', which stands at "],
        ),
        (
            ("applications", 0, "deployments", 0, "user_config", "deadline_ms"),
            0,
            ["applications[0].deployments[0].user_config.deadline_ms: Expected `int` >= 1, got 0"],
        ),
        (
            ("applications", 0, "deployments", 2, "ray_actor_options", "num_cpus"),
            "many",
            ["applications.0.deployments.2.ray_actor_options.num_cpus: ", "'many'"],
        ),
        (
            ("applications", 0, "deployments", 2, "max_ongoing_requests"),
            -1,
            ["applications.0.deployments.2.max_ongoing_requests: ", "-1"],
        ),
    ],
    ids=lambda part: dotted(part) if isinstance(part, tuple) else None,
)
def test_a_wrong_value_is_told_with_its_place(
    files: Files, path: Steps, value: object, parts: list[str]
) -> None:
    data = copy.deepcopy(FULL)
    at(data, path[:-1])[path[-1]] = value
    message = files.refusal(data)
    assert message.startswith(parts[0])
    assert all(part in message for part in parts)


def test_a_missing_model_is_told(files: Files) -> None:
    data = copy.deepcopy(FULL)
    del data["applications"][0]["args"]["model"]
    message = files.refusal(data)
    assert message.startswith("applications[0].args: Object missing required field `model`")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("RoundCoordinater", "did you mean 'RoundCoordinator'?"),
        ("Prefill", "did you mean 'PrefillReplica'?"),
        ("xyz", "valid keys are DecodeReplica, Ingress, KVDirectory, PrefillReplica, "),
    ],
)
def test_a_deployment_that_there_is_not_is_refused(files: Files, name: str, hint: str) -> None:
    data = copy.deepcopy(FULL)
    data["applications"][0]["deployments"].append({"name": name})
    message = files.refusal(data)
    assert message.startswith(f"applications[0].deployments[3].name: no deployment {name!r}, ")
    assert hint in message


@pytest.mark.parametrize("name", ["PrefillReplica", "DecodeReplica", "KVDirectory"])
def test_tunables_are_refused_where_there_are_none(files: Files, name: str) -> None:
    data = copy.deepcopy(FULL)
    data["applications"][0]["deployments"] = [{"name": name, "user_config": {}}]
    assert files.refusal(data) == (
        f"applications[0].deployments[0].user_config: {name} has no live tunables"
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [("RoundCoordinator", CoordinatorSettings), ("Ingress", DispatchSettings)],
)
def test_every_tunable_can_be_set(files: Files, name: str, kind: type[msgspec.Struct]) -> None:
    data = copy.deepcopy(FULL)
    data["applications"][0]["deployments"] = [
        {"name": name, "user_config": msgspec.to_builtins(kind())}
    ]
    assert len(check_file(files.write(data)).applications) == 1


# ------------------------------------------------------------------------------------ no files


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["expected a mapping at the top, got NoneType"]),
        (b"- 1\n", ["expected a mapping at the top, got list"]),
        (b"a: b: c\n", ["not YAML: ", "line 1, column 5"]),
        (b"applications: {{ apps }}\n", ["not YAML: ", "unhashable key", "line 1"]),
        (b"\xff\xfe\xfd", ["not YAML: "]),
        (b"a: !!python/object:os.system x\n", ["not YAML: ", "could not determine a constructor"]),
    ],
)
def test_what_is_no_cluster_file_is_told(tmp_path: Path, content: bytes, parts: list[str]) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        check_file(path)
    assert str(caught.value).startswith(f"{path}: {parts[0]}")
    assert all(part in str(caught.value) for part in parts)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file or directory"):
        check_file(tmp_path / "none.yaml")


@pytest.mark.parametrize("base", ["author", "canonical"])
def test_authors_cannot_be_read_where_nothing_is_kept(files: Files, base: str) -> None:
    data = copy.deepcopy(FULL)
    app = data["applications"][0]
    app["args"]["conversations"] = {"bidirectional_kv_xfer": False}
    app["deployments"][0]["user_config"]["reuse"] = {"mode": "blend", "base": base}
    if base == "canonical":
        check_file(files.write(data))
    else:
        assert "user_config.reuse.base: 'author' reads what" in files.refusal(data)


def test_what_is_written_for_nobody_is_told_by_the_command_and_no_error(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    data = copy.deepcopy(FULL)
    app = data["applications"][0]
    app["args"]["prefill"]["num_replicas"] = 3
    app["deployments"][0]["user_config"]["reuse"] = {"mode": "blend", "k": 4}
    path = files.write(data)
    assert main(["check", str(path)]) == 0
    ok, *notes = capsys.readouterr().out.splitlines()
    assert ok.startswith(f"{path}: ok: ")
    place = f"{path}: note: applications[0]"
    replicas, k = notes
    assert replicas == (
        f"{place}.args.prefill.num_replicas: 3 has no effect: autoscaling says how many there are"
    )
    assert k == (
        f"{place}.deployments[0].user_config.reuse.k: 4 has no effect: rule 'hkvd' chooses no "
        "beginnings"
    )


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_in_the_files_that_we_ship_nothing_is_written_for_nobody(path: Path) -> None:
    assert check_file(path).unread == []
