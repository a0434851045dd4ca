"""Triton takes seconds to import, and nobody on a CPU needs it."""

from __future__ import annotations

import os
import subprocess
import sys

USE = """
import sys, torch
from td_kernels.diff_apply import diff_apply
from td_kernels.diff_extract import diff_extract_plane
from td_kernels.fused_restore import dense_restore, fused_restore
from td_kernels.key_deviation import key_deviation
from td_kernels.planes import Planes, Turn
from td_kernels.restore_pipeline import restore_layers
from td_kernels.rotate import rotate

rows, at, plane = torch.ones(3, 1, 2), torch.arange(3), torch.zeros(3, 2)
planes, pages = Planes(rows, rows), Planes(torch.zeros(1, 3, 1, 2), torch.zeros(1, 3, 1, 2))
rotate(rows, torch.ones(3, 2), at)
key_deviation(rows[:, 0], rows[:, 0])
diff_apply(plane, diff_extract_plane(plane, rows[:, 0], block=1), rows[:, 0], block=1)
restore_layers([planes], [planes], at, at, [pages], Turn(torch.ones(3, 2), at))
print([name for name in ("triton", "td_serve", "vllm") if name in sys.modules])
"""


def test_nothing_on_a_cpu_imports_triton() -> None:
    environment = {key: one for key, one in os.environ.items() if key != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-c", USE], capture_output=True, text=True, env=environment, check=True
    )
    assert child.stdout.strip() == "[]"
