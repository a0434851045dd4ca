"""A cluster file, checked strictly.

Ray ignores keys that it does not know, at every level: a misspelt `num_replica` costs a night. Here
every key of the file is held against Ray's own schema, and what is ours (`args`, `user_config`)
against our own config. Duplicate keys, of which YAML keeps the last, are refused too.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import pydantic
import yaml
from ray.serve.schema import ServeDeploySchema

from td_serve.config import (
    CoordinatorSettings,
    DeploymentConfig,
    ReuseSettings,
    decode,
)
from td_serve.errors import ConfigError
from td_serve.serve.app import DEPLOYMENTS, USER_CONFIG
from td_serve.strict import nearest
from td_serve.unread import Unread, unread

OUR_IMPORT_PATH = "td_serve.serve.app:build"


class Checked(msgspec.Struct):
    """The td_serve applications in a cluster file, and what is written there for nobody."""

    applications: list[DeploymentConfig]
    unread: list[Unread]


def check_file(path: Path) -> Checked:
    """What a cluster file is made of.

    Raises ConfigError naming the file, the key's path, what stood there and what was expected.
    """
    try:
        data = yaml.load(path.read_bytes(), Loader=_StrictLoader)  # noqa: S506 - safe base
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    try:
        return _check(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _check(data: object) -> Checked:
    if not isinstance(data, Mapping):
        raise ConfigError(f"expected a mapping at the top, got {type(data).__name__}")
    _check_keys(data, ServeDeploySchema, "")
    try:
        ServeDeploySchema.model_validate(data)
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(step) for step in fault["loc"])
        raise ConfigError(f"{place}: {fault['msg']}, got {fault['input']!r}") from None
    found = Checked([], [])
    for number, app in enumerate(data.get("applications") or ()):
        if app["import_path"] == OUR_IMPORT_PATH:
            _check_ours(app, f"applications[{number}]", found)
    return found


def _check_ours(app: Mapping[str, Any], path: str, found: Checked) -> None:
    """Check an application of ours. Mutates `found`: adds it."""
    config = decode(app.get("args") or {}, DeploymentConfig, path=f"{path}.args")
    config.check_engines(f"{path}.args")
    found.applications.append(config)
    found.unread.extend(unread(config, f"{path}.args"))
    seen: set[str] = set()
    for number, deployment in enumerate(app.get("deployments") or ()):
        place, name = f"{path}.deployments[{number}]", deployment["name"]
        if name in seen:
            raise ConfigError(f"{place}.name: {name!r} stands twice, expected once")
        seen.add(name)
        if name not in DEPLOYMENTS:
            raise ConfigError(
                f"{place}.name: no deployment {name!r}, {nearest(name, list(DEPLOYMENTS))}"
            )
        if "user_config" in deployment:
            if name not in USER_CONFIG:
                raise ConfigError(f"{place}.user_config: {name} has no live tunables")
            tunables = decode(
                deployment["user_config"], USER_CONFIG[name], path=f"{place}.user_config"
            )
            if isinstance(tunables, CoordinatorSettings):
                _check_base(tunables.reuse, config, f"{place}.user_config.reuse.base")
            found.unread.extend(unread(tunables, f"{place}.user_config"))


def _check_base(reuse: ReuseSettings, config: DeploymentConfig, place: str) -> None:
    if reuse.reads_authors and not config.conversations.bidirectional_kv_xfer:
        raise ConfigError(
            f"{place}: 'author' reads what decode replicas keep, which conversations."
            "bidirectional_kv_xfer: false forbids; expected 'canonical'"
        )


def _check_keys(value: object, kind: Any, path: str) -> None:
    """Refuse keys that the pydantic model in `kind` does not have, here and below."""
    models = _models_in(kind)
    if isinstance(value, list):
        for number, item in enumerate(value):
            _check_keys(item, kind, f"{path}[{number}]")
    elif isinstance(value, Mapping) and models:
        fields = {name: field for model in models for name, field in model.model_fields.items()}
        for key, item in value.items():
            place = f"{path}.{key}".lstrip(".")
            if key not in fields:
                raise ConfigError(
                    f"{place}: unknown key {key!r}, {nearest(str(key), list(fields))}"
                )
            _check_keys(item, fields[key].annotation, place)


def _models_in(kind: Any) -> list[type[pydantic.BaseModel]]:
    """The pydantic models in a type: in `list[Model] | None`, Model."""
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        return [kind]
    return [model for part in get_args(kind) for model in _models_in(part)]


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # `<<`: what it brings may be overridden
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # the safe loader refuses it
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
