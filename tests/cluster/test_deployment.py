"""The deployment as a whole: tunables, refusals, memory, jobs."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import httpx
import pytest

from tests.cluster.harness import Cluster, complete, wait_for
from tests.conftest import MODEL

pytestmark = pytest.mark.cluster

VILLAGE = Path(__file__).resolve().parents[2] / "examples" / "village.jsonl"
GIB = 2**30


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
