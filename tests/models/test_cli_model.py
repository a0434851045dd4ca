"""`td-serve model`, as a person at a shell sees it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from td_serve.cli import main
from td_serve.models.catalog import SMOLLM2_135M_INSTRUCT

NAME = SMOLLM2_135M_INSTRUCT.name


def test_an_error_of_ours_is_one_line_and_exit_code_2(
    empty_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "fetch", "smollm"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"td-serve: error: no model named 'smollm'; did you mean {NAME}?\n"


def test_list_before_and_after(
    fetched: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for cache, state in ((tmp_path, "no"), (fetched.cache, "yes")):
        monkeypatch.setenv("TD_SERVE_CACHE", str(cache))
        assert main(["model", "list"]) == 0
        header, row = capsys.readouterr().out.splitlines()
        assert header.split() == ["NAME", "SIZE", "CACHED", "PATH"]
        name, size, unit, cached, path = row.split()
        assert (name, unit, cached) == (NAME, "MB", state)
        assert 500 < int(size) < 600
        assert path == str(cache / "models" / NAME)


def test_random_prints_the_directory(
    real_cache: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tiny"
    shape = ["--like=qwen3", "--layers=1", "--hidden=64", "--heads=2", "--kv-heads=1"]
    assert main(["model", "random", *shape, "--head-dim=32", "--out", str(out), "--seed=3"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert (out / "model.safetensors").is_file()
    assert main(["model", "random", "--out", str(out)]) == 2
    assert "which exists" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom td_serve.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'numpy', 'openai'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_reader_that_has_gone_is_no_error() -> None:
    code = "import sys; from td_serve.cli import main; sys.exit(main(['model', 'list']))"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == 0
