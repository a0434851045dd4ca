"""Publication of directories: whole or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from td_serve.models import cache


def test_a_directory_appears_when_it_is_complete(empty_cache: Path) -> None:
    target = cache.model_dir("m")
    with cache.locked(target), cache.publishing(target) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "file").write_text("x")
        assert not target.exists()
    assert (target / "sub" / "file").read_text() == "x"
    assert [p.name for p in target.parent.iterdir()] == ["m"]


def test_a_failure_leaves_nothing(empty_cache: Path) -> None:
    target = cache.model_dir("m")

    def build() -> None:
        with cache.locked(target), cache.publishing(target) as partial:
            (partial / "file").write_text("x")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build()
    assert list(target.parent.iterdir()) == []


def test_what_a_dead_builder_left_is_removed_and_others_are_not(empty_cache: Path) -> None:
    target = cache.model_dir("m")
    dead = target.parent / ".m.partial-abc"
    other = target.parent / ".m2.partial-abc"
    for path in (dead, other):
        path.mkdir(parents=True)
        (path / "file").write_text("x")
    with cache.locked(target), cache.publishing(target):
        assert not dead.exists()
    assert other.exists()
    (other / "file").unlink()
    other.rmdir()


def test_the_lock_keeps_a_second_process_out(empty_cache: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from td_serve.models import cache\n"
        "with cache.locked(Path(sys.argv[1])): print('in', flush=True)"
    )
    target = cache.model_dir("m")
    with cache.locked(target):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, text=True
        )
        with pytest.raises(subprocess.TimeoutExpired):
            child.communicate(timeout=1)
    out, _ = child.communicate()
    assert out == "in\n"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TD_SERVE_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/td_serve"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/td_serve"),
        ({}, "/home/me/.cache/td_serve"),
    ],
)
def test_where_the_cache_is(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TD_SERVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.cache_root() == Path(expected)
