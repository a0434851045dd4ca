"""Settings that say nothing beside the others: told apart from those that are read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from td_serve.config import CoordinatorSettings, DeploymentConfig, ReuseSettings
from td_serve.pic.rules import recovery
from td_serve.types import Rule, RuleName
from td_serve.unread import unread

WRITTEN: dict[str, Any] = {
    "k": 4,
    "ratio": 0.15,
    "left": 0.0,
    "depth": 0.5,
    "run": 3,
    "own": True,
    "weighed": False,
}
"""Every measure of a rule, none as by default."""


def places(config: msgspec.Struct) -> set[str]:
    return {one.place for one in unread(config, "here")}


def read_by(rule: Rule) -> set[str]:
    """What the rule itself reads of its measures; who has a check layer reads how to look, too."""

    class Watched:
        def __init__(self) -> None:
            self.read: set[str] = set()

        def __getattr__(self, name: str) -> Any:
            self.read.add(name)
            return getattr(rule, name)

    watched: Any = Watched()
    layer = recovery(watched, page_tokens=32).check_layer(8)
    looks = set() if layer is None else {"own", "weighed"}
    return {*watched.read, *looks} - {"name"}


def test_all_measures_are_written_here() -> None:
    assert WRITTEN.keys() == set(Rule.__struct_fields__) - {"name"}
    assert all(getattr(ReuseSettings(), name) != value for name, value in WRITTEN.items())


@pytest.mark.parametrize("rule", RuleName)
def test_of_a_rules_measures_those_are_told_that_it_does_not_read(rule: RuleName) -> None:
    settings = msgspec.convert({"mode": "blend", "rule": rule.value, **WRITTEN}, ReuseSettings)
    wanted = WRITTEN.keys() - read_by(settings.as_rule())
    assert places(settings) == {f"here.{name}" for name in wanted}


def test_a_note_has_the_place_the_value_and_the_reason() -> None:
    reuse = ReuseSettings(mode="blend", rule="hkvd", k=4)
    (note,) = unread(CoordinatorSettings(reuse=reuse), "user_config")
    assert (note.place, note.value) == ("user_config.reuse.k", 4)
    assert "'hkvd'" in note.why


def test_beside_exact_everything_else_is_told() -> None:
    settings = ReuseSettings(rule="first_k", ahead=False, base="author", **WRITTEN)
    assert places(settings) == {f"here.{name}" for name in ("rule", "ahead", "base", *WRITTEN)}


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ({}, set()),
        (
            {"conversations": {"bidirectional_kv_xfer": False, "read_patience_s": 9.0}},
            {"conversations.read_patience_s"},
        ),
        ({"conversations": {"read_patience_s": 9.0}}, set()),
        (
            {"prefill": {"num_replicas": 2, "autoscaling": {"max_replicas": 4}}},
            {"prefill.num_replicas"},
        ),
        ({"prefill": {"num_replicas": 2}}, set()),
        ({"frontend": {"tool_call_parser": "hermes"}}, {"frontend.tool_call_parser"}),
        (
            {"frontend": {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}},
            set(),
        ),
        ({"prefill": {"engine": {"pass_store_gib": 2.0}}}, set()),
        ({"decode": {"engine": {"pass_store_gib": 2.0}}}, {"decode.engine.pass_store_gib"}),
        (
            {"engine": {"pass_store_folder_gib": 2.0, "pass_store_below": ["redis://here:1"]}},
            {"engine.pass_store_folder_gib"},
        ),
        (
            {"prefill": {"engine": {"pass_store_folder_gib": 2.0}}},
            {"prefill.engine.pass_store_folder_gib"},
        ),
        (
            {
                "engine": {"pass_store_folder_gib": 2.0},
                "prefill": {"engine": {"pass_store_below": ["fs:///kept"]}},
            },
            set(),
        ),
    ],
)
def test_of_a_deployments_settings(args: dict[str, Any], wanted: set[str]) -> None:
    config = msgspec.convert({"model": "m", **args}, DeploymentConfig)
    assert places(config) == {f"here.{place}" for place in wanted}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, set()),
        ({"reuse": {"mode": "exact"}}, set()),
        ({"reuse": {"rule": "hkvd", "k": 2}}, set()),  # as if nothing were written
        ({"reuse": {"mode": "blend", "ahead": False}}, set()),
        ({"reuse": {"mode": "blend", "base": "author", "ahead": False}}, {"reuse.ahead"}),
        ({"dispatch": {"attempts": 1, "retry_backoff_s": 2.0}}, {"dispatch.retry_backoff_s"}),
        ({"dispatch": {"attempts": 2, "retry_backoff_s": 2.0}}, set()),
    ],
)
def test_of_tunables(settings: dict[str, Any], wanted: set[str]) -> None:
    decoded = msgspec.convert(settings, CoordinatorSettings)
    assert places(decoded) == {f"here.{place}" for place in wanted}
