"""Numbers in memory of any layout, NaN around and between them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from td_kernels.checks import FLOATS, STORED, bits
from td_kernels.dispatch import uses_triton

properties = settings(settings.get_profile("kernels"))
"""How tests of properties run here; see `conftest.py`."""

unchecked = pytest.mark.skipif(
    not uses_triton(torch.empty(0)), reason="a kernel without checks: in test_interpreted.py"
)

EPSILON = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Between results that were computed in float32 and rounded once: about one unit in the last place,
and a few in float32, where the order of operations shows."""

LAYOUTS = ("packed", "offset", "rows apart", "swapped")
ANY_LAYOUTS = (*LAYOUTS, "numbers apart")

floats = st.sampled_from(FLOATS)
stored = st.sampled_from(STORED)
layouts = st.sampled_from(LAYOUTS)
any_layouts = st.sampled_from(ANY_LAYOUTS)
seeds = st.integers(0, 2**32)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (made * 50).abs().to(dtype) if dtype == torch.uint8 else made.to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """NaN; of bytes, what is NaN in both 8-bit formats."""
    if dtype == torch.uint8:
        return torch.full(shape, 255, dtype=dtype)
    return torch.full(shape, torch.nan).to(dtype)


def laid(values: torch.Tensor, layout: str, device: str) -> torch.Tensor:
    """The same numbers as a view of other memory, on a device."""
    shape = values.shape
    if layout == "packed":
        base = poisoned(*shape, dtype=values.dtype).to(device)
        view = base
    elif layout == "offset":
        base = poisoned(values.numel() + 5, dtype=values.dtype).to(device)
        view = base[3 : 3 + values.numel()].view(shape)
    elif layout == "rows apart":
        base = poisoned(2 * shape[0], *shape[1:-1], shape[-1] + 3, dtype=values.dtype).to(device)
        view = base[1::2][..., 1 : 1 + shape[-1]]
    elif layout == "swapped":  # the last dimension stays the last in memory
        order = [1, 0, *range(2, len(shape))] if len(shape) > 2 else [0, 1]
        base = poisoned(*(shape[one] for one in order), dtype=values.dtype).to(device)
        view = base.permute(order)
    else:
        base = poisoned(*shape[:-1], 3 * shape[-1], dtype=values.dtype).to(device)
        view = base[..., 1::3]
    bits(view).copy_(bits(values))
    return view


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    """Bit for bit."""
    torch.testing.assert_close(bits(one.cpu()), bits(other.cpu()), rtol=0, atol=0)


def assert_close(one: torch.Tensor, other: torch.Tensor, scale: float = 1) -> None:
    """As close as rounding allows numbers of about this size to be, NaN where the other is."""
    error = EPSILON[other.dtype]
    torch.testing.assert_close(
        one.cpu(), other.cpu(), rtol=2 * error, atol=error * scale, equal_nan=True
    )


def assert_untouched_around(view: torch.Tensor) -> None:
    """What shares memory with `view` and is not of it is still NaN."""
    memory = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())
    around = torch.ones(len(memory), dtype=torch.bool)
    around.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    rest = bits(memory.cpu())[around]
    assert_same(rest, bits(poisoned(len(rest), dtype=view.dtype)))


def rotary_table(positions: int, rotary: int, scale: float = 1) -> torch.Tensor:
    """Cosines and sines as models have them, float32, [positions, rotary]."""
    speeds = 10000.0 ** (-torch.arange(rotary // 2) / max(1, rotary // 2))
    angles = torch.arange(positions)[:, None] * speeds
    return torch.cat([angles.cos(), angles.sin()], -1) * scale
