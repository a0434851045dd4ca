"""The envelope of `--json` files, and writing them whole or not at all."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from td_serve.errors import TdServeError
from td_serve.report import envelope, machine, versions, write_json


class Row(msgspec.Struct):
    value: float


def test_the_envelope_holds_the_agreed_keys_and_plain_values() -> None:
    made = envelope(["td-serve", "bench"], 7, [Row(1.5)], {"best": Row(2.0)})
    assert list(made) == ["command", "versions", "machine", "seed", "rows", "summary"]
    assert made["command"] == ["td-serve", "bench"]
    assert made["seed"] == 7
    assert made["rows"] == [{"value": 1.5}]
    assert made["summary"] == {"best": {"value": 2.0}}
    assert json.loads(json.dumps(made)) == made


def test_reports_and_replays_are_made_without_importing_anything_heavy() -> None:
    code = (
        "import sys; from td_serve.report import envelope; envelope([], 0, [], {});"
        "import td_serve.sim.report, td_serve.cli.replay;"
        "print([m for m in ('torch', 'ray', 'vllm', 'nixl') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_every_component_has_a_version_or_none() -> None:
    found = versions()
    assert set(found) == {"python", "td_serve", "vllm", "ray", "torch", "nixl"}
    assert found["python"] == sys.version.split()[0]


def test_the_machine_is_described() -> None:
    found = machine()
    assert set(found) == {"cpu", "cores", "memory_gib", "amx", "avx512", "accelerator"}
    assert found["cores"] >= 1
    assert found["memory_gib"] > 0


def test_a_report_replaces_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    write_json(path, {"rows": [1]})
    write_json(path, {"rows": [2]})
    assert json.loads(path.read_text()) == {"rows": [2]}
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.mkdir()
    with pytest.raises(TdServeError, match=r"taken: cannot be written"):
        write_json(path, {})
    assert list(tmp_path.iterdir()) == [path]
