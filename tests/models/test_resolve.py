"""Every way to name a model, and every way to get it wrong."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from td_serve.errors import ModelError, ModelNotFetched
from td_serve.models.catalog import CATALOG, SMOLLM2_135M_INSTRUCT
from td_serve.models.resolve import resolve

NAME = SMOLLM2_135M_INSTRUCT.name


def test_a_fetched_model_is_its_directory(real_cache: Any) -> None:
    assert resolve(NAME) == str(real_cache.model)


def test_a_model_that_is_not_fetched_names_the_command(empty_cache: Path) -> None:
    with pytest.raises(ModelNotFetched, match=f"run: td-serve model fetch {NAME}"):
        resolve(NAME)


def test_a_directory_with_a_model_is_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("mine", "./mine", "~/mine", str(tmp_path / "mine")):
        assert resolve(name) == str(tmp_path / "mine")


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(str(tmp_path))


def test_a_hub_id_is_returned_unchanged() -> None:
    assert resolve("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"


def test_a_typing_error_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ModelError, match=rf"'smollm2-135m'.*did you mean {NAME}\?"):
        resolve("smollm2-135m")


@pytest.mark.parametrize("name", ["", "./nowhere", "/no/where", "../x/y", "~nobody/x", "a/b/c"])
def test_what_is_nothing_is_answered_with_what_is_known(name: str) -> None:
    with pytest.raises(ModelError, match=f"known models: {', '.join(CATALOG)}"):
        resolve(name)


@given(st.text(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_resolves_or_is_a_model_error(empty_cache: Path, name: str) -> None:
    try:
        path = resolve(name)
    except ModelError:
        return  # any other exception fails the test
    assert path == name or (Path(path) / "config.json").is_file()
