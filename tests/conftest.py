"""Fixtures for all tests: the real model, a plain engine to compare with, a real deployment.

Expensive ones live for the session and are made when first asked for.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

# Before anything imports torch or vLLM: one thread for each engine, all in this process, no hub.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

from tests.cluster.harness import ROOT, Cluster, cluster_file
from tests.plain import plain_engine
from tests.redis_server import Redis

# On a busy machine anything may take long once.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# A shell has what it runs in the background ignore interrupts, and so would every command that a
# test starts in order to interrupt it.
signal.signal(signal.SIGINT, signal.default_int_handler)

MODEL = "smollm2-135m-instruct"


class OneDeploymentAtATime(LoadFileScheduling):
    """What `make test` runs side by side: files, but one after the other those that use the
    deployment that the session has, or have to be alone; they take longest, and come first."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "deployments" if _deploys(file) else file


@functools.cache
def _deploys(file: str) -> bool:
    text = (ROOT / file).read_text("utf-8")
    return "pytestmark = pytest.mark.cluster" in text


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneDeploymentAtATime:
    return OneDeploymentAtATime(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Memory is what limits: deployments beside the one that many have come first, while the other
    process is small; those that want to be alone last, when nobody needs that one any more."""

    def turn(item: pytest.Item) -> int:
        marker = item.get_closest_marker("cluster")
        if marker is None:
            return 1
        return 0 if marker.kwargs.get("beside") else 2 if marker.kwargs.get("alone") else 1

    items.sort(key=turn)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The real small model; `make test` fetches it first."""
    from td_serve.models.resolve import resolve

    return Path(resolve(MODEL))


@pytest.fixture(scope="session")
def plain(model_dir: Path) -> Any:
    """One plain vLLM engine (`vllm.LLM`) in this process: what the deployment must agree with."""
    return plain_engine(model_dir, kv_cache_memory_bytes=2**28)


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    """A real server, empty at first."""
    server = Redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """clusters/local.yaml, deployed: one prefill and one decode replica, float32."""
    data = cluster_file(
        engine={"max_model_len": 4096, "kv_cache_gib": 0.5},
        # Short enough for a test to see a lease end.
        nixl={"lease_s": 10},
    )
    # Long enough for three clients on a busy machine.
    tunables = data["applications"][0]["deployments"][0]["user_config"]
    tunables["implicit_window_ms"] = 2000
    with Cluster() as cluster:
        cluster.deploy(data)
        yield cluster


@pytest.fixture(scope="session")
def deployment_url(cluster: Cluster) -> str:
    """The OpenAI base URL of `cluster`."""
    return cluster.url


@pytest.fixture(scope="session")
def deployment_model_dir(model_dir: Path) -> Path:
    """The model that `cluster` serves."""
    return model_dir
