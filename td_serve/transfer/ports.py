"""Side-channel ports for NIXL, unique among all td_serve processes of one machine.

vLLM binds the port it is given from a thread and waits for that thread without a time limit, so a
port that is taken hangs the engine. A free port therefore has to be *held* between choosing it and
binding it: each is a file under a directory of this machine, held by an advisory lock for as long
as the process lives, so that a killed process gives it back.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from td_serve.errors import ConfigError


class PortLease:
    """`count` consecutive ports, held until `release` or until the process ends.

    `folder` is this user's alone. What a holder puts there is named after its first port, so that
    the next one takes its place and nothing piles up, however holders end.
    """

    def __init__(self, first: int, locks: list[int], folder: Path) -> None:
        self.first = first
        self.folder = folder
        self._locks = locks

    @property
    def count(self) -> int:
        return len(self._locks)

    def release(self) -> None:
        """Give the ports back. Safe to call twice."""
        for lock in self._locks:
            os.close(lock)
        self._locks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def lease_ports(
    first: int, last: int, *, count: int = 1, host: str = "", directory: Path | None = None
) -> PortLease:
    """Hold the lowest `count` consecutive free ports of [first, last].

    A port is free when no other td_serve process holds it and nothing listens on `host:port`.
    Raises ConfigError when the range has no such run, or `host` is no address of this machine.
    """
    if not _is_free(host, 0):
        raise ConfigError(f"nixl.host: {host!r} is no address of this machine")
    folder = directory or Path(tempfile.gettempdir()) / f"td_serve-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (status := folder.stat()).st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{folder}: expected a directory that only this user can use")
    held: list[int] = []
    for port in range(first, last + 1):
        lock = _try_hold(folder / str(port))
        if lock is None or not _is_free(host, port):
            if lock is not None:
                os.close(lock)
            for other in held:
                os.close(other)
            held = []
            continue
        held.append(lock)
        if len(held) == count:
            return PortLease(port - count + 1, held, folder)
    for other in held:
        os.close(other)
    raise ConfigError(
        f"nixl.port_range: no {count} consecutive free ports in {first}..{last} on this machine"
    )


def _try_hold(path: Path) -> int | None:
    """A descriptor that holds the lock of `path`, or None when another process has it."""
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
