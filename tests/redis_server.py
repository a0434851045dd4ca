"""A Redis server of Debian's, for tests: the machine's own, or unpacked beside the environment."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_PACKAGES = ("redis-server", "redis-tools", "libjemalloc2", "liblzf1")


class Redis:
    """A server on a free port of this machine, which keeps nothing on disk."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        program, env = _program()
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", "."]
        self._process = subprocess.Popen(
            [program, *options], cwd=self._folder, env=env, stdout=subprocess.DEVNULL
        )
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except ConnectionRefusedError:
                assert self._process.poll() is None, "Redis has ended"
                time.sleep(0.05)
        raise TimeoutError("Redis does not answer")

    def stop(self) -> None:
        """Let it stand still: it is there, and does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def _program() -> tuple[str, dict[str, str]]:
    if found := shutil.which("redis-server"):
        return found, dict(os.environ)
    root = Path(sys.prefix) / "debian"
    program = root / "usr/bin/redis-server"
    if not program.exists():
        _unpack(root)
    libraries = root / "usr/lib" / f"{os.uname().machine}-linux-gnu"
    return str(program), {**os.environ, "LD_LIBRARY_PATH": str(libraries)}


def _unpack(root: Path) -> None:
    """Debian's packages, under `root`; nothing is installed."""
    making = root.with_name(f"{root.name}-{os.getpid()}")
    making.mkdir(parents=True)
    try:
        subprocess.run(["apt-get", "download", *_PACKAGES], cwd=making, check=True)
        for package in making.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, "unpacked"], cwd=making, check=True)
        if not root.exists():
            (making / "unpacked").rename(root)
    finally:
        shutil.rmtree(making)
