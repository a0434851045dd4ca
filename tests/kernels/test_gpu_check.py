"""What `make gpu-check` runs: nothing without a GPU; its checks of kernels, in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"

PARITY = """
from gpu_parity import parity
for name, what in parity("cpu", [(1, 1, 8), (65, 3, 12)]):
    print(name, what)
"""


def child(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=SCRIPTS,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and minutes of work for it")
def test_without_a_gpu_nothing_is_changed() -> None:
    report = ROOT / "docs" / "gpu_check.md"
    before = report.read_bytes()
    ran = child("gpu_check.py")
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr == "gpu-check: no CUDA device here; nothing was run or changed\n"
    assert report.read_bytes() == before


def test_kernels_agree_with_their_references() -> None:
    ran = child("-c", PARITY, TRITON_INTERPRET="1")
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 24


def test_fused_and_dense_restores_are_compared() -> None:
    small = ["--layers", "2", "--tokens", "70", "--mirrors", "2", "--repeats", "2"]
    ran = child("restore_bench.py", *small)
    assert ran.returncode == 0, ran.stderr
    dense, fused, ratio = ran.stdout.splitlines()
    assert dense.startswith("dense ")
    assert fused.startswith("fused ")
    assert ratio.startswith("fused is ")
