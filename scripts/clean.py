"""Stop what this checkout left running, then remove its environment and caches: `make clean`.

Standard library only, Linux only (reads /proc). A process is this checkout's if its command line
names a file in the checkout's `.venv` or it has such a file mapped: Ray's daemons and workers are
found by the one or the other, and no other checkout's are touched. This process and its ancestors
are left alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 5.0
TREES = (
    ".venv",
    ".hypothesis",
    ".import_linter_cache",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "build",
    "dist",
    "td_serve.egg-info",
)
SOURCES = ("td_serve", "kernels", "tests", "examples", "scripts")


def ours(venv: Path, proc: Path = Path("/proc")) -> list[int]:
    """Ids of the processes that run from `venv`, without this one and its ancestors."""
    spared = ancestors(proc)
    mark = f"{venv}/".encode()
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) in spared:
            continue
        try:
            runs_from = mark in (entry / "cmdline").read_bytes()
            if runs_from or mark in (entry / "maps").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it has ended, or is another user's
            continue
    return sorted(found)


def ancestors(proc: Path = Path("/proc")) -> set[int]:
    """This process's id, its parent's, and so on to the first."""
    chain = set()
    pid = os.getpid()
    while pid > 0:
        chain.add(pid)
        try:
            stat = (proc / str(pid) / "stat").read_text()
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
    return chain


def stop(venv: Path) -> int:
    """End the processes that run from `venv`: asked first, killed after a grace period.

    Returns how many there were. Killing is repeated until none is left, since Ray's daemons start
    new workers for those that go.
    """
    seen: set[int] = set()
    deadline = time.monotonic() + GRACE_S
    while pids := ours(venv):
        late = time.monotonic() > deadline
        for pid in pids:
            if late or pid not in seen:
                send(pid, signal.SIGKILL if late else signal.SIGTERM)
        seen.update(pids)
        if time.monotonic() > deadline + GRACE_S:
            print(f"clean: processes that do not end: {pids}", file=sys.stderr)
            break
        time.sleep(0.1)
    return len(seen)


def send(pid: int, number: signal.Signals) -> None:
    """Signal one process; one that has ended meanwhile is fine."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        print(f"clean: process {pid} is another user's", file=sys.stderr)


def main() -> int:
    """Clean the checkout that this file is in."""
    if count := stop(ROOT / ".venv"):
        print(f"stopped {count} processes")
    for name in TREES:
        if (ROOT / name).exists():
            print(f"removing {name}")
            shutil.rmtree(ROOT / name)
    for name in SOURCES:
        for cache in (ROOT / name).rglob("__pycache__"):
            shutil.rmtree(cache)
    return 0


if __name__ == "__main__":
    sys.exit(main())
