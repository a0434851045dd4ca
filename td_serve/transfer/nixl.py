"""NIXL as configured, and as it really came up.

UCX picks transports by itself and falls back to slower ones without a word (TTFT of 98 s instead of
1 s has been reported for EFA). So each engine's own agents report to a `UcxLog`, and at start-up we
compare the transports that they chose with what the deployment asks for. This module reads and
writes plain text: it does not import nixl.
"""

from __future__ import annotations

import collections
import os
import re
import socket
import threading
import time
import tty

from td_serve.config import NixlConfig
from td_serve.errors import ConfigError

_LANES = re.compile(r"UCX\s+INFO\s+\S+ (\S+) cfg#\d+ (.*)")
_LANE = re.compile(r"\w+\(([^)]*)\)")
_LINES_KEPT = 1000


class UcxLog:
    """What UCX says in processes that log to `path`, read as it is said.

    A terminal, because UCX writes through stdio: into a file its lines would show up only once
    4 KiB have gathered or the process has ended. A thread reads on, so that no writer ever blocks.
    Holds two descriptors and the last lines; `close` gives them back.
    """

    def __init__(self) -> None:
        self._master, self._slave = os.openpty()
        tty.setraw(self._slave)
        self.path = os.ttyname(self._slave)
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES_KEPT)
        self._reader = threading.Thread(target=self._read, name="ucx-log", daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def close(self) -> None:
        """Stop reading. Call once, when the processes that log here have ended."""
        os.close(self._slave)
        self._reader.join(timeout=1.0)

    def _read(self) -> None:
        rest = ""
        try:
            while chunk := os.read(self._master, 65536):
                *lines, rest = (rest + chunk.decode("utf-8", "replace")).split("\n")
                self._lines.extend(lines)
        except OSError:
            pass  # the last writer has gone
        finally:
            os.close(self._master)


def engine_env(config: NixlConfig, *, host: str, port: int, log: UcxLog) -> dict[str, str]:
    """Environment of an engine's processes."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "UCX_LOG_LEVEL": "info",
        "UCX_LOG_FILE": log.path,
        **config.env,
    }


def side_channel_host(config: NixlConfig) -> str:
    """The address peers connect to: as configured, else this machine's on its default route."""
    if config.host is not None:
        return config.host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only asks for the route.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def transports_in(log: str, scope: str = "self") -> list[str]:
    """The transports in a UCX log, sorted: `agent self cfg#0 rma_am(tcp/lo) am(cma/memory)` gives
    ["cma", "tcp"]. `scope` is what the lanes are for: `self` (known once an agent is up),
    `intra-node` or `inter-node` (known once it has a peer there)."""
    names = {
        device.split("/")[0]
        for line in log.splitlines()
        if (found := _LANES.search(line)) and found.group(1) == scope
        for lane in _LANE.findall(found.group(2))
        for device in lane.split()
    }
    return sorted(names)


def assert_transports(config: NixlConfig, log: UcxLog, *, patience_s: float = 5.0) -> list[str]:
    """The transports of the agents that report to `log`.

    Raises ConfigError when one that the deployment requires is missing. Backends other than UCX say
    nothing here: NIXL refuses to start without the backend that was asked for, so for them the
    backend's name is the answer.
    """
    if config.backend != "UCX":
        return [config.backend.lower()]
    deadline = time.monotonic() + patience_s
    while not (found := transports_in(log.text)) and time.monotonic() < deadline:
        time.sleep(0.05)
    missing = sorted(set(config.require_transports) - set(found))
    if missing:
        raise ConfigError(
            f"nixl.require_transports: NIXL came up on {', '.join(found) or 'no transport'}, "
            f"without {', '.join(missing)}; UCX said:\n{log.text}"
        )
    return found
