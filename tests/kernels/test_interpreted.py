"""The Triton kernels do what their references do, in Triton's interpreter.

Triton decides when it is imported whether it interprets, and other tests have it imported by then,
so that each file of properties runs once more in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = (
    "test_rotate.py",
    "test_key_deviation.py",
    "test_diff_extract.py",
    "test_diff_apply.py",
    "test_fused_restore.py",
)


@pytest.mark.parametrize("name", FILES)
def test_interpreted_kernels_do_the_same(name: str) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    child = subprocess.run(
        # Of the fixtures above this folder none is needed here: they take seconds to import.
        [
            *(sys.executable, "-m", "pytest", "-q", f"--confcutdir={HERE}", f"--rootdir={ROOT}"),
            *("-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / name)),
        ],
        cwd=ROOT,
        env={**clean, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert " passed" in child.stdout, child.stdout
