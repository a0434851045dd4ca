"""scripts/clean.py stops this checkout's processes and no others."""

import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "clean.py"
_spec = importlib.util.spec_from_file_location("td_clean", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
clean = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(clean)


def start(venv: Path, *, hidden: bool = False, stubborn: bool = False) -> "subprocess.Popen[bytes]":
    """A process that runs from `venv` until it is stopped; `hidden`: with a title of its own."""
    program = venv / "bin" / "program"
    if not program.exists():
        program.parent.mkdir(parents=True)
        shutil.copy(shutil.which("bash") or "/bin/bash", program)
    trap = "trap '' TERM; " if stubborn else ""
    child = subprocess.Popen(
        ["ray::worker" if hidden else str(program), "-c", f"{trap}echo up; read x"],
        executable=program,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    return child


@pytest.fixture
def other(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of another checkout; must outlive the test."""
    child = start(tmp_path / "checkout2" / ".venv")
    yield child
    assert child.poll() is None
    child.communicate()


def test_what_runs_from_the_environment_is_stopped_and_nothing_else(
    tmp_path: Path, other: "subprocess.Popen[bytes]"
) -> None:
    venv = tmp_path / "checkout" / ".venv"
    children = [start(venv), start(venv, hidden=True)]
    assert clean.ours(venv) == sorted(child.pid for child in children)
    assert clean.stop(venv) == 2
    assert [child.wait() for child in children] == [-signal.SIGTERM] * 2
    assert clean.ours(venv) == []
    for child in children:
        child.communicate()


def test_what_ignores_the_request_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clean, "GRACE_S", 0.2)
    child = start(tmp_path / ".venv", stubborn=True)
    assert clean.stop(tmp_path / ".venv") == 1
    assert child.wait() == -signal.SIGKILL
    child.communicate()


def test_it_spares_itself_and_its_ancestors() -> None:
    assert {os.getpid(), os.getppid()} <= clean.ancestors()


def test_nothing_running_is_fine(tmp_path: Path) -> None:
    assert clean.stop(tmp_path / ".venv") == 0
