"""The processes that this one starts, down to the last: found, counted, ended."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import threading
from collections.abc import Iterator, Sequence

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_END_PATIENCE_S = 30.0


@contextlib.contextmanager
def ending_descendants() -> Iterator[None]:
    """End every process that this one starts within, and that those start, on every path.

    Orphans among them are adopted meanwhile, so that none gets away. SIGTERM ends the block as
    Ctrl-C does; neither breaks the clearing up.
    """
    others = set(descendants())
    _adopt_orphans(True)
    terminated = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        with uninterrupted():
            end([one for one in descendants() if one not in others])
        signal.signal(signal.SIGTERM, terminated)
        _adopt_orphans(False)


def descendants() -> list[psutil.Process]:
    """Every live process that this one started, or that one of those did."""
    return psutil.Process().children(recursive=True)


def end(processes: Sequence[psutil.Process]) -> None:
    """Kill `processes` and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=_END_PATIENCE_S)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM, in the main thread: clearing up is bounded in time anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _adopt_orphans(adopt: bool) -> None:
    """Make this process the parent of descendants whose parent ends, or stop that (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)
