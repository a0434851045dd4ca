"""How far keys are from others: whatever sums up gives what the reference gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_kernels.key_deviation import key_deviation, reference
from tests.kernels.tensors import any_layouts, assert_close, floats, laid, properties, random, seeds


@properties
@given(st.integers(0, 9), st.integers(0, 40), floats, seeds, any_layouts, any_layouts)
def test_distances_and_lengths(
    device: str, tokens: int, width: int, dtype: torch.dtype, seed: int, one: str, other: str
) -> None:
    here = random(seed, tokens, width, dtype=dtype)
    there = random(seed + 1, tokens, width, dtype=dtype)
    found = key_deviation(laid(here, one, device), laid(there, other, device))
    assert found.dtype == torch.float32
    assert_close(found, reference.key_deviation(here, there), scale=width)


def test_they_are_squared(device: str) -> None:
    here = torch.tensor([[3.0, 1.0], [0.0, 2.0]], device=device)
    there = torch.tensor([[0.0, 1.0], [0.0, 4.0]], device=device)
    assert key_deviation(here, there).tolist() == [[9, 4], [1, 16]]


def test_differences_are_taken_in_float32(device: str) -> None:
    """1,000 + 0.5 is no bfloat16, but the distance between two that are counts in full."""
    here = torch.tensor([[1000.0]], dtype=torch.bfloat16, device=device)
    there = torch.tensor([[0.25]], dtype=torch.bfloat16, device=device)
    assert key_deviation(here, there).tolist() == [[999.75**2], [0.0625]]


def test_numbers_far_apart_are_found(device: str) -> None:
    memory = torch.empty(2**31 + 40, dtype=torch.bfloat16, device=device)
    far = memory.as_strided((5, 4), (2**29 + 7, 1))
    far.copy_(random(3, 5, 4, dtype=torch.bfloat16))
    near = random(4, 5, 4, dtype=torch.bfloat16)
    for one, other in ((far, near.to(device)), (near.to(device), far)):
        assert_close(key_deviation(one, other), reference.key_deviation(one.cpu(), other.cpu()), 8)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("here", torch.zeros(3), r"here has shape \[3\]; expected \[tokens, width\]"),
        ("here", torch.zeros(3, 4).long(), "here is torch.int64; expected torch.float32 or"),
        ("here", torch.zeros(3, 4).to(torch.float8_e5m2), "here is torch.float8_e5m2; expected"),
        ("there", torch.zeros(2, 4), r"there has shape \[2, 4\]; expected \[tokens = 3, width = 4"),
        ("there", torch.zeros(3, 4).half(), "there is torch.float16; expected torch.float32"),
        ("there", torch.zeros(3, 4, device="meta"), "there is on meta; expected cpu"),
    ],
)
def test_wrong_arguments_are_named(name: str, wrong: torch.Tensor, message: str) -> None:
    good = {"here": torch.zeros(3, 4), "there": torch.zeros(3, 4)}
    with pytest.raises(ValueError, match=f"^{message}"):
        key_deviation(**{**good, name: wrong})
