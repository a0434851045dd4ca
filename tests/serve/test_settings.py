"""What changes while a deployment runs: what is wrong is refused, and what runs goes on."""

from __future__ import annotations

import pytest

from td_serve.config import CoordinatorSettings
from td_serve.errors import ConfigError
from td_serve.serve.settings import changed

PLACE = "RoundCoordinator.user_config"
WRONG = {"reuse": {"mode": "blend", "rule": "paper"}}


def test_good_settings_are_taken() -> None:
    found = changed({"deadline_ms": 5}, CoordinatorSettings, PLACE, is_running=True)
    assert found is not None
    assert found.deadline_ms == 5


def test_a_deployment_does_not_start_with_wrong_ones() -> None:
    with pytest.raises(ConfigError, match=r"user_config\.reuse\.rule: 'paper'"):
        changed(WRONG, CoordinatorSettings, PLACE, is_running=False)


def test_one_that_runs_goes_on_with_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    assert changed(WRONG, CoordinatorSettings, PLACE, is_running=True) is None
    assert "user_config.reuse.rule: 'paper'" in caplog.text
    assert "the settings before are in force" in caplog.text
