"""A private Ray cluster with one deployment on it, for tests: real processes, on free ports."""

from __future__ import annotations

import contextlib
import copy
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import httpx
import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LOCAL = ROOT / "clusters" / "local.yaml"


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def cluster_file(**changes: Any) -> dict[str, Any]:
    """clusters/local.yaml as data, with parts of its application's `args` replaced (merged)."""
    data: dict[str, Any] = yaml.safe_load(LOCAL.read_text("utf-8"))
    _merge(data["applications"][0]["args"], changes)
    return data


def _merge(into: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


class Cluster:
    """A Ray head of its own. `deploy` puts a cluster file on it; `stop` ends every process."""

    _all: ClassVar[list[Cluster]] = []

    @classmethod
    def stop_all(cls) -> None:
        """Stop the clusters that this process has started: the next one needs their memory."""
        for cluster in cls._all:
            cluster.stop()

    def __init__(self) -> None:
        self._all.append(self)
        self._is_stopped = False
        self.gcs, self.dashboard, self.client, self.agent, self.http = free_ports(5)
        # Unix socket paths are short: a temporary directory under pytest's would be too long.
        self.temp = Path(tempfile.mkdtemp(prefix="tds-", dir="/tmp"))
        self.base = f"http://127.0.0.1:{self.http}"
        self.url = f"{self.base}/v1"
        self.data: dict[str, Any] = {}
        self.headers: dict[str, str] = {}
        """What goes with our own requests: a key, where the deployment asks for one."""
        self.log = self.temp / "ray.out"
        self._env = {
            **os.environ,
            # As in an activated environment: jobs find our commands.
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_ADDRESS": f"127.0.0.1:{self.gcs}",
            # A token of its own: nobody else's client gets in by mistake, nor we elsewhere.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
        }
        with self.log.open("wb") as log:
            self._head = subprocess.Popen(
                [
                    BIN / "ray",
                    "start",
                    "--head",
                    "--block",
                    "--num-cpus=4",
                    f"--port={self.gcs}",
                    f"--ray-client-server-port={self.client}",
                    f"--dashboard-port={self.dashboard}",
                    f"--dashboard-agent-listen-port={self.agent}",
                    "--min-worker-port=0",
                    "--max-worker-port=0",
                    "--node-ip-address=127.0.0.1",
                    f"--temp-dir={self.temp}",
                    f"--object-store-memory={200 * 2**20}",
                    "--disable-usage-stats",
                ],
                env={k: v for k, v in self._env.items() if k != "RAY_ADDRESS"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_for(self._dashboard_is_up, 90, f"the Ray dashboard ({self.log})")
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def deploy(self, data: dict[str, Any], *, check: bool = True) -> None:
        """Deploy a cluster file (its HTTP port becomes this cluster's) and wait until it serves.
        One that is meant to be wrong is not to be checked."""
        data["http_options"]["port"] = self.http
        self.data = data
        path = self.temp / "cluster.yaml"
        path.write_text(yaml.safe_dump(data), "utf-8")
        if check:
            self.run("td-serve", "check", str(path))
        before = self._deployed_at()
        self.run("serve", "deploy", "--address", self.dashboard_url, str(path))
        wait_for(lambda: self._deployed_at() != before, 60, "Serve to take the file")
        wait_for(self.is_running, 240, lambda: f"the deployment ({self.temp}): {self.status()}")

    @contextlib.contextmanager
    def reusing(self, *, check: bool = True, **reuse: Any) -> Iterator[None]:
        """Have rounds prefilled so within (`reuse` of the coordinator's `user_config`)."""
        before = self.data
        changed = copy.deepcopy(before)
        (coordinator,) = [
            one
            for one in changed["applications"][0]["deployments"]
            if one["name"] == "RoundCoordinator"
        ]
        coordinator["user_config"]["reuse"] = reuse
        self.deploy(changed, check=check)
        try:
            yield
        finally:
            self.deploy(before)

    @property
    def dashboard_url(self) -> str:
        return f"http://127.0.0.1:{self.dashboard}"

    def run(self, program: str, *arguments: str, check: bool = True) -> str:
        """Run a command of the environment against this cluster; returns its output."""
        done = subprocess.run(
            [str(BIN / program), *arguments],
            env=self._env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert not check or done.returncode == 0, (
            f"{program} {arguments}:\n{done.stdout}{done.stderr}"
        )
        return done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        """Serve's own word on the applications."""
        found: dict[str, Any] = self._ask_dashboard("/api/serve/applications/").json()
        return found

    def is_running(self) -> bool:
        """Every application runs, with all of its replicas and no others, and they are known."""
        applications = self.status()["applications"].values()
        if any(app["status"] == "DEPLOY_FAILED" for app in applications):
            raise AssertionError(f"deployment failed: {[app['message'] for app in applications]}")
        healthy = applications and all(
            app["status"] == "RUNNING"
            and all(_is_complete(one) for one in app["deployments"].values())
            for app in applications
        )
        return bool(healthy) and httpx.get(f"{self.base}/health", timeout=10).status_code == 200

    def replicas(self) -> list[dict[str, Any]]:
        """What the directory knows."""
        answer = httpx.get(f"{self.url}/replicas", headers=self.headers, timeout=10)
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()["replicas"]
        return found

    def wait_until_idle(self, patience_s: float = 60) -> None:
        """Nothing runs, waits or is pinned in any engine."""
        wait_for(
            lambda: all(
                (one["running"], one["waiting"], one["kv_usage"]) == (0, 0, 0.0)
                for one in self.replicas()
            ),
            patience_s,
            lambda: f"idle engines: {self.replicas()}",
        )

    def processes(self) -> list[psutil.Process]:
        """Every live process of this cluster, head first."""
        try:
            head = psutil.Process(self._head.pid)
        except psutil.NoSuchProcess:
            return []
        return [head, *head.children(recursive=True)]

    def pids(self, deployment: str) -> list[int]:
        """Processes of a deployment's replicas (not of their engines)."""
        found = []
        for process in self.processes():
            try:
                title = process.cmdline()
            except psutil.Error:
                continue
            if title and title[0].startswith("ray::ServeReplica") and deployment in title[0]:
                found.append(process.pid)
        return found

    def pid_of(self, replica: str) -> int:
        """The process that hosts the engine `replica`, which is not the engine's own."""
        (found,) = [
            one["pid"]
            for app in self.status()["applications"].values()
            for deployment in app["deployments"].values()
            for one in deployment["replicas"]
            if one["replica_id"] in replica.split("-")
        ]
        return int(found)

    def engine_of(self, replica: str) -> psutil.Process:
        """The process of the engine `replica`."""
        children = psutil.Process(self.pid_of(replica)).children(recursive=True)
        (engine,) = [child for child in children if "Engine" in child.name()]
        return engine

    def logged(self) -> str:
        """All that the replicas have logged."""
        logs = sorted((self.temp / "session_latest" / "logs" / "serve").glob("replica_*.log"))
        errors = sorted((self.temp / "session_latest" / "logs").glob("worker-*.err"))
        return "".join(path.read_text("utf-8", "replace") for path in [*logs, *errors])

    def kill(self, deployment: str) -> None:
        """Kill the replicas of a deployment, as a crash would."""
        pids = self.pids(deployment)
        assert pids, f"no process of {deployment}"
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def resident_bytes(self) -> int:
        """Resident memory of all processes; a page that several share counts once (PSS)."""
        total = 0
        for process in self.processes():
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
        return total

    def stop(self) -> None:
        """End every process of this cluster, as a power cut would, and remove its files.

        Of one that has been stopped, nothing is left to stop."""
        if self._is_stopped:
            return
        self._is_stopped = True
        processes = self.processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._head.wait(timeout=30)
        psutil.wait_procs(processes, timeout=30)
        shutil.rmtree(self.temp, ignore_errors=True)

    def _deployed_at(self) -> list[float]:
        """When each application was last deployed, by Serve's clock."""
        applications = self.status()["applications"]
        return [applications[name]["last_deployed_time_s"] for name in sorted(applications)]

    def _dashboard_is_up(self) -> bool:
        assert self._head.poll() is None, f"ray start ended:\n{self.log.read_text()}"
        return self._ask_dashboard("/api/version").is_success

    def _ask_dashboard(self, path: str) -> httpx.Response:
        token = self._env["RAY_AUTH_TOKEN"]
        return httpx.get(
            self.dashboard_url + path, headers={"Authorization": f"Bearer {token}"}, timeout=10
        )


def complete(cluster: Cluster, **body: Any) -> dict[str, Any]:
    """A completion by the cluster's own model."""
    with httpx.Client(base_url=cluster.url, headers=cluster.headers, timeout=120) as http:
        model = http.get("/models").json()["data"][0]["id"]
        answer = http.post(
            "/completions", json={"model": model, "prompt": "The mill", "max_tokens": 4, **body}
        )
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def is_engine(process: psutil.Process) -> bool:
    """It is an engine's, and has not ended."""
    try:
        return "EngineCore" in process.name() or "EngineCore" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _is_complete(deployment: Mapping[str, Any]) -> bool:
    states = [replica["state"] for replica in deployment["replicas"]]
    target = deployment["deployment_config"]["num_replicas"]
    return deployment["status"] == "HEALTHY" and states == ["RUNNING"] * target


def wait_for(
    condition: Callable[[], object], patience_s: float, what: str | Callable[[], str]
) -> None:
    """Poll until `condition` holds; connection errors count as "not yet"."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            if condition():
                return
        except (httpx.HTTPError, KeyError):
            pass
        if time.monotonic() > deadline:
            raise AssertionError(
                f"waited {patience_s:.0f} s for {what() if callable(what) else what}"
            )
        time.sleep(0.5)
