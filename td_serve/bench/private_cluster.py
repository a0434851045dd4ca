"""A Ray of our own, that no other Ray meets and that leaves nothing behind.

Within `private_ray`, a deployment runs by `serve run` (`served`, as a user starts it) or on a Ray
of this process (`deployed`, where its replicas can be called by their handles).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from td_serve.bench.processes import descendants, end, ending_descendants, free_port, uninterrupted
from td_serve.errors import TdServeError

_STOP_PATIENCE_S = 45.0
_LOG_LINES = 25


class Served(msgspec.Struct, frozen=True):
    """A running `serve run`. `launched_at` is on `time.perf_counter`'s clock."""

    base: str
    log: Path
    process: Any
    launched_at: float

    def check(self) -> None:
        """Raises TdServeError, with what it said, when it has ended or cannot deploy."""
        failed = any("Deploying app" in line and "failed" in line for line in self._lines())
        if failed or self.process.poll() is not None:
            raise TdServeError("serve run failed; " + self.last_words())

    def last_words(self) -> str:
        """The end of what it said."""
        return "the end of what it said:\n" + "\n".join(self._lines()[-_LOG_LINES:])

    def _lines(self) -> list[str]:
        return self.log.read_text("utf-8", errors="replace").splitlines()


@contextlib.contextmanager
def private_ray() -> Iterator[Path]:
    """Keep Ray, imported and started within, to ourselves; yields its directory.

    At the end whatever was started within is ended, its files are removed, and the environment is
    as it was. Raises TdServeError when Ray has been imported: it has read its settings then.
    """
    if "ray" in sys.modules:
        raise TdServeError("Ray is imported already: it would not heed settings of our own")
    # Paths of Unix sockets are short: a temporary directory of the user's own could be too long.
    temp = Path(tempfile.mkdtemp(prefix="tds-", dir="/tmp"))
    own = {
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": str(temp),
        # A token of our own: nothing is read from or written to the user's home.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        with ending_descendants():
            yield temp
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def served(data: Mapping[str, Any], temp: Path) -> Iterator[Served]:
    """`serve run` of the cluster file `data` (its HTTP address becomes a free local one)."""
    port = free_port()
    path, log = temp / "cluster.yaml", temp / "serve-run.out"
    http = {**(data.get("http_options") or {}), "host": "127.0.0.1", "port": port}
    path.write_text(yaml.safe_dump({**data, "http_options": http}), "utf-8")
    command = [str(Path(sys.executable).with_name("serve")), "run", str(path)]
    launched_at = time.perf_counter()
    with log.open("wb") as out:
        # A session of its own: Ctrl-C reaches this process alone, which then stops it in order.
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Served(f"http://127.0.0.1:{port}", log, process, launched_at)
    finally:
        with uninterrupted():
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_PATIENCE_S)
            end(descendants())


@contextlib.contextmanager
def deployed(args: Mapping[str, Any], name: str, temp: Path) -> Iterator[str]:
    """An application of td_serve's, on a Ray of this process; yields its base URL.

    Live tunables, which `args` do not carry, keep their defaults. Raises TdServeError.
    """
    import ray
    from ray import serve

    from td_serve.serve.app import build

    port = free_port()
    try:
        try:
            ray.init(
                address="local",
                num_cpus=4,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                object_store_memory=200 * 2**20,
                _temp_dir=str(temp),
            )
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(build(dict(args)), name=name, route_prefix="/")
        except RuntimeError as error:
            raise TdServeError(f"the deployment failed: {error}") from error
        yield f"http://127.0.0.1:{port}"
    finally:
        # On its way out Ray prints calls to its own controller that were cut short: no news.
        with uninterrupted(), contextlib.redirect_stdout(io.StringIO()):
            try:
                serve.shutdown()
            finally:
                # Without it, Ray would look for its head for a minute after the head has ended.
                ray.shutdown()
