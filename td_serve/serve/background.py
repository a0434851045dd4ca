"""`serve run` in the background: started, waited for, stopped, with nothing left running.

For the demo and the benchmarks. The Ray it starts is a private one: a Ray that runs on this machine
already is neither used nor touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import yaml

from td_serve.errors import TdServeError

STOP_PATIENCE_S = 60.0


class NotServingError(TdServeError):
    """`serve run` ended, or was not ready in time. The message holds the end of its log."""


@contextlib.contextmanager
def serve_run(
    cluster: Path,
    *,
    patience_s: float = 300.0,
    on_wait: Callable[[float], None] = lambda seconds: None,
) -> Iterator[str]:
    """Serve a cluster file while the block runs; gives the server's base URL.

    The file's HTTP port is used if it is free, else another one. `on_wait` is called now and then
    with the seconds since the start. On every way out the server is asked to stop, and what is left
    of its processes after a minute is killed.

    Raises NotServingError.
    """
    with tempfile.TemporaryDirectory(prefix="td_serve-run-") as folder:
        file, base_url = _with_free_port(cluster, Path(folder))
        log = Path(folder) / "serve.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [Path(sys.executable).parent / "serve", "run", file],
                env={**os.environ, "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is ours: we tell the server ourselves.
                start_new_session=True,
            )
        try:
            _wait_until_ready(process, base_url, log, patience_s, on_wait)
            yield base_url
        finally:
            _stop(process)


def _wait_until_ready(
    process: subprocess.Popen[bytes],
    base_url: str,
    log: Path,
    patience_s: float,
    on_wait: Callable[[float], None],
) -> None:
    started = time.monotonic()
    while (waited := time.monotonic() - started) < patience_s:
        if process.poll() is not None:
            raise NotServingError(f"`serve run` ended with {process.returncode}:\n{_tail(log)}")
        if _has_failed(log):
            raise NotServingError(f"the deployment failed:\n{_tail(log)}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{base_url}/health", timeout=2).is_success:
                return
        on_wait(waited)
        time.sleep(0.25)
    raise NotServingError(f"not ready after {patience_s:.0f} s:\n{_tail(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt `serve run`, as its user would; kill what has not ended in time."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STOP_PATIENCE_S)
    _, alive = psutil.wait_procs(family, timeout=10)
    for left in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait()


def _with_free_port(cluster: Path, folder: Path) -> tuple[Path, str]:
    """The cluster file, or a copy of it on a free port if its own is taken; and its base URL."""
    data = yaml.safe_load(cluster.read_text("utf-8"))
    http = data.setdefault("http_options", {})
    port = http.get("port", 8000)
    if not _is_free(port):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = http["port"] = probe.getsockname()[1]
        cluster = folder / cluster.name
        cluster.write_text(yaml.safe_dump(data), "utf-8")
    return cluster.resolve(), f"http://127.0.0.1:{port}"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _has_failed(log: Path) -> bool:
    """`serve run` tells of a deployment that failed, and then goes on running."""
    said = log.read_text("utf-8", "replace").splitlines()
    return any("Deploying app" in line and "failed" in line for line in said)


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-lines:])
