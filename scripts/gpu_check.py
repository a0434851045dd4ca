"""Are the Triton kernels right and fast on this GPU? Writes docs/gpu_check.md: `make gpu-check`.

Needs a CUDA device, torch and Triton; neither vLLM nor td_serve. Takes a few minutes, at most
eight: what there is no time for is left out, and said so. Exits 2 without a CUDA device, 1 where a
kernel differs from its reference; neither changes the report.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

try:
    import torch
except ImportError:
    sys.exit("gpu-check: this Python has no torch; name another: make gpu-check PYTHON=…")

import restore_bench as bench
from gpu_parity import BLOCK, parity

from td_kernels.diff_apply import diff_apply_kv
from td_kernels.diff_extract import diff_extract
from td_kernels.fused_restore import fused_restore
from td_kernels.key_deviation import key_deviation
from td_kernels.planes import Planes, Turn
from td_kernels.rotate import rotate

REPORT = Path(__file__).resolve().parent.parent / "docs" / "gpu_check.md"
SECONDS = 400
"""After these no other measurement begins."""

MODELS = {"Qwen2.5-7B": (28, 4, 128), "Qwen2.5-14B": (48, 8, 128)}
"""Layers, KV heads, head size."""

FAR_MORE_THAN_A_CACHE = 2**18
"""Tokens: a plane of keys is 256 MiB or more."""


# ------------------------------------------------------------------ fast


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """On the device, one after the other, warmed up."""
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def recorded(run: Callable[[], object]) -> Callable[[], object]:
    """The same work on the device without the host's: a CUDA graph."""
    run()  # compiles what is not compiled yet
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class Speed(NamedTuple):
    name: str
    ms: float
    bytes: int
    copy_ms: float
    """Of a plain copy that reads and writes as many bytes together."""

    def row(self) -> str:
        rate = self.bytes / self.ms / 1e6
        share = self.copy_ms / self.ms
        return f"| {self.name} | {self.ms:.3f} | {rate:,.0f} | {share:.0%} |"


def speeds(heads: int, size: int, tokens: int) -> Iterator[Speed]:
    """Each kernel at one model's shape, bfloat16."""
    width = heads * size
    keys, values, master, other = (
        torch.randn(tokens, width, device="cuda").to(torch.bfloat16) for _ in range(4)
    )
    plane = keys.numel() * keys.element_size()
    table = bench.rotary_table(tokens + 8, size).cuda()
    at = torch.arange(tokens, device="cuda")
    some = torch.arange(0, tokens // BLOCK, 7, device="cuda")
    rows = torch.zeros(len(some) * BLOCK, width, device="cuda", dtype=torch.bfloat16)
    heads_of = [one.view(tokens, heads, size) for one in (keys, values, master, other)]
    pages = Planes(*(one.view(-1, 16, heads, size) for one in heads_of[2:]))
    source, order = at.clone(), torch.randperm(tokens // 16, device="cuda")
    slots = order[at // 16] * 16 + at % 16
    source[at // BLOCK % 7 == 0] = -1 - torch.arange(
        int((at // BLOCK % 7 == 0).sum()), device="cuda"
    )
    patch = Planes(rows.view(-1, heads, size), rows.view(-1, heads, size))
    where = torch.where(source < 0, at, -1)
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "rotate, in place": (lambda: rotate(heads_of[0], table, at, out=heads_of[0]), 2 * plane),
        "rotate, from elsewhere": (
            lambda: rotate(heads_of[0], table, at, at + 7, out=heads_of[2]),
            2 * plane,
        ),
        "key_deviation": (lambda: key_deviation(keys, master), 2 * plane),
        "diff_extract": (
            lambda: diff_extract(keys, values, master, other, block=BLOCK),
            4 * plane,
        ),
        "diff_apply_kv, one block in 7": (
            lambda: diff_apply_kv(master, other, some, rows, rows, block=BLOCK),
            4 * rows.numel() * 2,
        ),
        "fused_restore, one block in 7 patched": (
            lambda: fused_restore(
                Planes(*heads_of[:2]), patch, source, slots, pages, Turn(table, at, where)
            ),
            4 * plane,
        ),
    }
    for name, (run, moved) in runs.items():
        memory = torch.zeros(2, moved // 2, dtype=torch.uint8, device="cuda")
        copy = milliseconds(lambda memory=memory: memory[0].copy_(memory[1]))
        yield Speed(name, milliseconds(run), moved, copy)


def restores(deadline: float) -> Iterator[str]:
    """Rows of a table: fused against dense, all layers of several mirrors of 4,096 tokens."""
    for model, (layers, heads, size) in MODELS.items():
        for patch in (0.1, 0.2):
            for count in (1, 3, 5, 10):
                case = f"| {model} | {count} | {patch:.0%} |"
                if time.monotonic() > deadline:
                    yield f"{case} out of time | | | | | |"
                    continue
                try:
                    yield f"{case} {_compared(layers, heads, size, patch, count)}"
                except torch.cuda.OutOfMemoryError:
                    yield f"{case} out of memory | | | | | |"
                torch.cuda.empty_cache()


def _compared(layers: int, heads: int, size: int, patch: float, count: int) -> str:
    shape = bench.Shape(layers, heads, size, 4096, patch, count, torch.bfloat16)
    some = list(bench.mirrors(shape, "cuda"))
    bench.check(some[0])
    ways = [lambda: [one.dense() for one in some], lambda: [one.fused() for one in some]]
    dense, fused = (1e3 * seconds for seconds in bench.alternating(ways, 6))
    dense_device, fused_device = (milliseconds(recorded(way), 10) for way in ways)
    rate = shape.bytes / fused_device / 1e6
    hosted = milliseconds(_from_the_host(some[0]), 5)
    return (
        f"{dense_device / count:.3f} | {fused_device / count:.3f} |"
        f" {dense_device / fused_device:.2f} | {rate:,.0f} |"
        f" {dense / count:.2f} / {fused / count:.2f} | {hosted:.2f} |"
    )


def _from_the_host(mirror: bench.Mirror) -> Callable[[], None]:
    """Its master and patch in pinned memory: layers are copied while others are restored."""
    masters, patches = (
        [Planes(*(plane.cpu().pin_memory() for plane in one)) for one in layers]
        for layers in (mirror.masters, mirror.patches)
    )
    pinned = mirror._replace(masters=masters, patches=patches)
    mirror.fused()
    wanted = [Planes(*(plane.clone() for plane in one)) for one in mirror.pages]
    for one in mirror.pages:
        one.keys.fill_(torch.nan)
        one.values.fill_(torch.nan)
    pinned.fused()
    for one, other in zip(mirror.pages, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    return pinned.fused


# ------------------------------------------------------------------ the report


def hardware() -> list[str]:
    """Name, memory, driver, versions, date."""
    driver = "unknown"
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        pass
    import triton

    about = torch.cuda.get_device_properties(0)
    return [
        f"- {about.name}, {about.total_memory / 2**30:.0f} GiB, sm_{about.major}{about.minor}",
        f"- driver {driver}, CUDA {torch.version.cuda}",
        f"- torch {torch.__version__}, triton {triton.__version__}",
        f"- {time.strftime('%Y-%m-%d', time.gmtime())}",
    ]


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu-check: no CUDA device here; nothing was run or changed", file=sys.stderr)
        return 2
    began = time.monotonic()
    torch.manual_seed(0)
    sizes = [(1, 1, 8), (33, 3, 80), (1000, 5, 64), (4097, 8, 128)]
    agreed: dict[str, int] = {}
    try:
        for name, what in parity("cuda", sizes):
            agreed[name] = agreed.get(name, 0) + 1
            print(f"right: {name}, {what}", flush=True)
    except AssertionError as error:
        print(f"gpu-check: a kernel differs from its reference\n{error}", file=sys.stderr)
        return 1
    lines = ["# The kernels on a GPU", "", "Written by `make gpu-check`.", "", *hardware(), ""]
    lines += ["## Right", "", "Triton against `reference.py`, outputs filled with NaN before.", ""]
    lines += ["| operation | cases |", "| --- | --- |"]
    lines += [f"| {name} | {count}, all equal |" for name, count in agreed.items()]
    for model, (_, heads, size) in MODELS.items():
        lines += ["", f"## Fast: one layer of {model}, bfloat16, {FAR_MORE_THAN_A_CACHE:,} tokens"]
        lines += ["", "| operation | ms | GB/s | of a plain copy's speed |", "| --- " * 4 + "|"]
        for speed in speeds(heads, size, FAR_MORE_THAN_A_CACHE):
            lines.append(speed.row())
            print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    lines += ["", "## Fused against dense: mirrors of 4,096 tokens, all layers, bfloat16", ""]
    lines += ["Milliseconds of a mirror: on the device alone (a CUDA graph); with the host's work"]
    lines += ["(eager, dense / fused); from pinned host memory by two buffers (one mirror).", ""]
    lines += ["| model | mirrors | patch | dense | fused | ratio | GB/s | eager | from the host |"]
    lines += ["| --- " * 9 + "|"]
    for row in restores(began + SECONDS):
        lines.append(row)
        print(row, flush=True)
    REPORT.write_text("\n".join([*lines, ""]), encoding="utf-8")
    print(f"gpu-check: {REPORT} written after {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
