"""The deployment as a whole: tunables, redeploys, neighbours, memory, jobs."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster.harness import Cluster, cluster_file, wait_for
from tests.conftest import MODEL

pytestmark = pytest.mark.cluster

VILLAGE = Path(__file__).resolve().parents[2] / "examples" / "village.jsonl"
GIB = 2**30


@pytest.fixture(scope="module")
def neighbour(tiny_model: Path) -> Iterator[Cluster]:
    """A second deployment on the same machine: another model, two ingresses and coordinators."""
    with Cluster() as cluster:
        cluster.deploy(
            cluster_file(
                model=str(tiny_model),
                engine={"max_model_len": 1024, "kv_cache_gib": 0.1},
                ingress={"num_replicas": 2},
                coordinator={"num_replicas": 2},
            )
        )
        yield cluster


def complete(cluster: Cluster, **body: Any) -> dict[str, Any]:
    """A completion by the cluster's own model."""
    with httpx.Client(base_url=cluster.url, timeout=120) as client:
        model = client.get("/models").json()["data"][0]["id"]
        answer = client.post(
            "/completions", json={"model": model, "prompt": "The mill", "max_tokens": 4, **body}
        )
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def test_memory_of_the_local_deployment(cluster: Cluster) -> None:
    complete(cluster)
    assert cluster.resident_bytes() < 10 * GIB


def test_engines_say_what_they_are(cluster: Cluster) -> None:
    prefill, decode = sorted(cluster.replicas(), key=lambda state: state["role"], reverse=True)
    assert (prefill["role"], decode["role"]) == ("prefill", "decode")
    assert prefill["nixl_port"] != decode["nixl_port"]
    for state in (prefill, decode):
        assert {"tcp", "cma"} <= set(state["transports"])


def test_tunables_change_while_it_runs(cluster: Cluster) -> None:
    """A changed `user_config` reaches the coordinator; no replica is born again."""
    born = {state["replica"] for state in cluster.replicas()}
    coordinators = cluster.pids("RoundCoordinator")
    before = copy.deepcopy(cluster.data)
    changed = copy.deepcopy(before)
    tunables = changed["applications"][0]["deployments"][0]["user_config"]
    tunables["deadline_ms"] = 300
    cluster.deploy(changed)
    # Alone in a round for two: served after the new deadline, and not after ten seconds.
    place = {"sim": "tuned", "round": 0, "agent": "adam", "n_agents": 2}
    with httpx.Client(base_url=cluster.url, timeout=8) as client:
        answer = client.post(
            "/completions",
            json={"model": MODEL, "prompt": "Hm", "max_tokens": 1, "td_round": place},
        )
    assert answer.status_code == 200
    assert {state["replica"] for state in cluster.replicas()} == born
    assert cluster.pids("RoundCoordinator") == coordinators
    cluster.deploy(before)


def test_a_wrong_file_is_refused_at_start(cluster: Cluster, tmp_path: Path) -> None:
    """What is ours is checked at start too; the deployment that runs goes on."""
    import yaml

    wrong = copy.deepcopy(cluster.data)
    wrong["applications"][0]["args"]["engine"]["kv_cache_gb"] = 1
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(wrong), "utf-8")
    said = cluster.run("td-serve", "check", str(path), check=False)
    assert "engine.kv_cache_gb: unknown key 'kv_cache_gb', did you mean 'kv_cache_gib'?" in said
    cluster.run("serve", "deploy", "--address", cluster.dashboard_url, str(path))
    app = cluster.data["applications"][0]["name"]
    wait_for(
        lambda: cluster.status()["applications"][app]["status"] == "DEPLOY_FAILED",
        60,
        "the refusal",
    )
    message = cluster.status()["applications"][app]["message"]
    assert "args.engine.kv_cache_gb: unknown key" in message
    assert complete(cluster)["choices"]
    cluster.deploy(cluster.data)


def test_two_deployments_do_not_meet(cluster: Cluster, neighbour: Cluster) -> None:
    """Other ports, other engines, other directories; each answers for its own model."""
    states = [*cluster.replicas(), *neighbour.replicas()]
    assert len(states) == 4
    for name in ("replica", "nixl_port"):
        assert len({state[name] for state in states}) == 4, name
    here, there = complete(cluster, temperature=0), complete(neighbour, temperature=0)
    assert here["model"] != there["model"]
    assert here["choices"][0]["text"] != there["choices"][0]["text"]
    cluster.wait_until_idle()
    neighbour.wait_until_idle()


def test_a_session_has_one_coordinator_whichever_ingress_it_comes_by(neighbour: Cluster) -> None:
    """Members that met different coordinators would wait for each other until the deadline."""
    agents, sims = ["adam", "mary", "wren"], [f"hashed-{number}" for number in range(8)]

    def play(sim: str, agent: str) -> None:
        place = {"sim": sim, "round": 0, "agent": agent, "n_agents": 3, "deadline_ms": 60_000}
        complete(neighbour, td_round=place)

    with ThreadPoolExecutor(24) as pool:
        for done in [pool.submit(play, sim, agent) for sim in sims for agent in agents]:
            done.result()
    assert len(neighbour.pids("Ingress")) == len(neighbour.pids("RoundCoordinator")) == 2
    for sim in sims:
        outputs = httpx.get(f"{neighbour.url}/rounds/{sim}/0", timeout=30).json()["outputs"]
        assert [one["agent"] for one in outputs] == agents
    logs = "".join(
        log.read_text("utf-8", "replace")
        for log in (neighbour.temp / "session_latest" / "logs").glob("worker-*.err")
    )
    assert logs.count("3 members, 0 absent") >= len(sims)


def test_three_redeploys_leave_one_of_each(neighbour: Cluster) -> None:
    """Each change of `args` makes every replica anew; none of the old ones stays."""
    epochs = set()
    for number in range(3):
        data = copy.deepcopy(neighbour.data)
        data["applications"][0]["args"]["engine"]["seed"] = number + 1
        data["applications"][0]["args"] |= {"ingress": {}, "coordinator": {}}  # one of each
        data["applications"][0]["args"]["prefill"] = {"drain_timeout_s": 5}
        data["applications"][0]["args"]["decode"] = {"drain_timeout_s": 5}
        neighbour.deploy(data)
        assert complete(neighbour)["choices"]
        wait_for(lambda: len(neighbour.replicas()) == 2, 60, "the old replicas' end")
        epochs.add(tuple(sorted(state["epoch"] for state in neighbour.replicas())))
    assert len(epochs) == 3, "every redeploy made new engines"
    for deployment, count in {
        "Ingress": 1,
        "RoundCoordinator": 1,
        "KVDirectory": 1,
        "PrefillReplica": 1,
        "DecodeReplica": 1,
    }.items():
        wait_for(
            lambda name=deployment, count=count: len(neighbour.pids(name)) == count,
            60,
            lambda name=deployment, count=count: f"{count} of {name}: {neighbour.pids(name)}",
        )
    engines = [p for p in neighbour.processes() if _is_engine(p)]
    assert len(engines) == 2, "no engine of an old replica is left"


def _is_engine(process: psutil.Process) -> bool:
    try:
        return "EngineCore" in process.name() or "EngineCore" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_replay_as_a_ray_job(cluster: Cluster, tmp_path: Path) -> None:
    """The same command that a user types, run by Ray on the cluster."""
    out = tmp_path / "replay.json"
    said = cluster.run(
        "ray",
        "job",
        "submit",
        f"--address={cluster.dashboard_url}",
        "--",
        "td-serve",
        "replay",
        str(VILLAGE),
        f"--url={cluster.url}",
        "--rounds=2",
        "--max-tokens=8",
        f"--json={out}",
    )
    assert "succeeded" in said
    result = json.loads(out.read_text("utf-8"))
    assert [row["failures"] for row in result["rows"]] == [0, 0]
    assert result["summary"]["prompt_tokens"] > 0
