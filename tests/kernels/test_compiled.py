"""The Triton kernels compile for NVIDIA GPUs, which needs none, and move memory in wide pieces."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from td_kernels import tiles
from td_kernels.dispatch import uses_triton
from td_kernels.planes import Planes, Turn


@pytest.fixture(autouse=True, scope="module")
def compiles() -> None:
    assert not uses_triton(torch.empty(0)), "TRITON_INTERPRET is set: nothing would be compiled"


TOKENS, HEADS, SIZE = 64, 4, 128
"""Qwen2.5-7B's heads."""


def keys(dtype: torch.dtype = torch.bfloat16, heads: int = HEADS, size: int = SIZE) -> torch.Tensor:
    return torch.zeros(TOKENS, heads, size, dtype=dtype)


def rotated(dtype: torch.dtype, heads: int, size: int, rotary: int, neox: bool) -> None:
    from td_kernels.rotate import triton

    at = torch.zeros(TOKENS, dtype=torch.int64)
    some = keys(dtype, heads, size)
    triton.rotate(some, torch.zeros(99, rotary), at, at, neox, torch.empty_like(some))


def restored(dtype: torch.dtype, heads: int, size: int, rotary: int | None) -> None:
    from td_kernels.fused_restore import triton

    at = torch.zeros(TOKENS, dtype=torch.int64)
    planes = Planes(keys(dtype, heads, size), keys(dtype, heads, size))
    pages = torch.zeros(4, 2, 16, heads, size).to(dtype)
    turn = None if rotary is None else Turn(torch.zeros(99, rotary), at, at)
    triton.restore(planes, planes, at, at, Planes(pages[:, 0], pages[:, 1]), turn)


def deviated(dtype: torch.dtype) -> None:
    from td_kernels.key_deviation import triton

    triton.key_deviation(keys(dtype).flatten(1), keys(dtype).flatten(1))


def extracted(dtype: torch.dtype) -> None:
    from td_kernels.diff_extract import triton

    triton.is_changed(keys(dtype).flatten(1), keys(dtype).flatten(1))


def applied(dtype: torch.dtype, planes: int) -> None:
    from td_kernels.diff_apply import triton

    one = (keys(dtype).flatten(1), keys(dtype).flatten(1))
    triton.apply([one] * planes, torch.zeros(4, dtype=torch.int64), 16)


CASES: dict[str, tuple[Callable[..., None], tuple[Any, ...], bool]] = {
    "rotate": (rotated, (torch.bfloat16, HEADS, SIZE, SIZE, True), True),
    "rotate float32": (rotated, (torch.float32, HEADS, SIZE, SIZE, True), True),
    "rotate interleaved": (rotated, (torch.float16, 3, 80, 32, False), False),
    "restore": (restored, (torch.bfloat16, HEADS, SIZE, SIZE), True),
    "restore float32": (restored, (torch.float32, HEADS, SIZE, SIZE), True),
    "restore in part": (restored, (torch.float16, 3, 96, 64), False),
    "restore bytes": (restored, (torch.float8_e4m3fn, 8, SIZE, None), True),
    "deviation": (deviated, (torch.bfloat16,), True),
    "extract": (extracted, (torch.bfloat16,), True),
    "extract bytes": (extracted, (torch.float8_e5m2,), True),
    "apply": (applied, (torch.bfloat16, 1), True),
    "apply both": (applied, (torch.float32, 2), True),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, dict[str, Any]]]:
    """Kernels that would have been launched, each with its arguments."""
    from triton.runtime import JITFunction

    seen: list[tuple[Any, dict[str, Any]]] = []

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        seen.append((kernel, {**dict(zip(kernel.arg_names, arguments, strict=False)), **named}))

    monkeypatch.setattr(JITFunction, "run", run)
    # Other tests have small tiles.
    monkeypatch.setattr(tiles, "NUMBERS", 2048)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return seen


def compiled(kernel: Any, arguments: dict[str, Any], capability: int) -> Any:
    """As a launch would: numbers that are 1 are constants, and what 16 divides is known to be."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    kinds = {
        torch.float32: "*fp32",
        torch.bfloat16: "*bf16",
        torch.float16: "*fp16",
        torch.uint8: "*u8",
        torch.int16: "*i16",
        torch.int32: "*i32",
        torch.int64: "*i64",
    }
    for place, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if parameter.is_constexpr or (is_whole and value == 1):
            signature[parameter.name] = "constexpr"
            constants[place,] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = kinds[value.dtype]
            attributes[place,] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_kernels_compile(
    launches: list[tuple[Any, dict[str, Any]]], case: str, capability: int
) -> None:
    run, arguments, is_aligned = CASES[case]
    run(*arguments)
    ((kernel, given),) = launches
    made = compiled(kernel, given, capability)
    assert made.asm["cubin"]
    moves = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", made.asm["ptx"])
    widths = Counter(int(count or 1) * int(bits) for count, bits in moves)
    # One byte says of a token whether it has changed.
    narrow = widths[8] + widths[16] - case.startswith("extract")
    assert not is_aligned or (widths[128] and not narrow), f"moves of so many bits: {widths}"
