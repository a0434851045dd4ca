"""Which blocks differ: those in which any bit does, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_kernels.blocks import block_tokens
from td_kernels.checks import STORED, bits
from td_kernels.diff_extract import diff_extract, diff_extract_plane
from tests.kernels.tensors import any_layouts, laid, properties, random, seeds, stored

changes = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(0, 24)), max_size=4)


@properties
@given(
    st.integers(0, 13),
    st.integers(0, 24),
    st.integers(1, 24),
    st.integers(1, 6),
    stored,
    changes,
    seeds,
    any_layouts,
)
def test_changed_blocks_are_found(
    device: str,
    tokens: int,
    width: int,
    value_width: int,
    block: int,
    dtype: torch.dtype,
    changed: list[tuple[int, int, int]],
    seed: int,
    layout: str,
) -> None:
    master = [random(seed, tokens, one, dtype=dtype) for one in (width, value_width)]
    mirror = [plane.clone() for plane in master]
    expected: list[set[int]] = [set(), set()]
    for plane, token, place in changed:
        if token < tokens and place < master[plane].shape[1]:
            # The least bit there is, and another one each time.
            bits(mirror[plane])[token, place] ^= 1
            is_changed = not torch.equal(bits(mirror[plane])[token], bits(master[plane])[token])
            expected[plane].discard(token)
            expected[plane] |= {token} if is_changed else set()
    there = [laid(plane, layout, device) for plane in mirror]
    original = [laid(plane, "offset", device) for plane in master]
    found = diff_extract(*there, *original, block=block)
    assert found.dtype == torch.int64
    assert found.tolist() == sorted({token // block for token in expected[0] | expected[1]})
    for plane in range(2):
        alone = diff_extract_plane(there[plane], original[plane], block=block)
        assert alone.tolist() == sorted({token // block for token in expected[plane]})


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_every_bit_counts(device: str, dtype: torch.dtype) -> None:
    master = random(1, 1, 3, dtype=dtype).to(device)
    for bit in range(8 * master.element_size()):
        mirror = master.clone()
        mirror.view(torch.uint8)[0, -1 - bit // 8] ^= 1 << bit % 8
        assert diff_extract_plane(mirror, master, block=2).tolist() == [0], f"bit {bit}"


def test_bits_are_compared_not_numbers(device: str) -> None:
    master = torch.tensor([[torch.nan], [0.0], [torch.inf], [1.0]], device=device)
    mirror = torch.tensor([[torch.nan], [-0.0], [torch.inf], [1.0]], device=device)
    assert diff_extract(mirror, mirror, master, master, block=1).tolist() == [1]
    assert diff_extract(master, mirror, master, master, block=3).tolist() == [0]


def test_numbers_far_apart_are_found(device: str) -> None:
    memory = torch.zeros(1, dtype=torch.uint8, device=device).new_empty(2**31 + 40)
    far = memory.as_strided((5, 4), (2**29 + 7, 1))
    far.copy_(random(3, 5, 4, dtype=torch.uint8))
    near = far.contiguous()
    near[4, 3] ^= 1
    assert diff_extract_plane(far, near, block=1).tolist() == [4]
    assert diff_extract_plane(near, far, block=1).tolist() == [4]


def test_rows_of_changed_blocks_are_packed(device: str) -> None:
    some = torch.tensor([0, 2, 3], device=device)
    assert block_tokens(some, 11, 3).tolist() == [0, 1, 2, 6, 7, 8, 9, 10]
    assert block_tokens(some, 11, 1).tolist() == [0, 2, 3]
    assert block_tokens(some[:0], 11, 3).tolist() == []


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("keys", torch.zeros(5), r"keys has shape \[5\]; expected \[tokens, width\]"),
        ("keys", torch.zeros(5, 4).long(), "keys is torch.int64; expected torch.float32 or"),
        ("master_keys", torch.zeros(5, 3), r"master_keys has shape \[5, 3\]; expected \[tokens = "),
        ("master_keys", torch.zeros(5, 4).half(), "master_keys is torch.float16; expected torch.f"),
        ("master_values", torch.zeros(4, 4), r"master_values has shape \[4, 4\]; expected"),
        ("master_values", torch.zeros(5, 4, device="meta"), "master_values is on meta; expected c"),
        ("block", 0, "block is 0; expected 1 or more"),
    ],
)
def test_wrong_arguments_are_named(name: str, wrong: Any, message: str) -> None:
    names = ("keys", "values", "master_keys", "master_values")
    good: dict[str, Any] = {**{one: torch.zeros(5, 4) for one in names}, "block": 2}
    with pytest.raises(ValueError, match=f"^{message}"):
        diff_extract(**{**good, name: wrong})


def test_keys_and_values_are_of_the_same_tokens() -> None:
    four, five = torch.zeros(4, 4), torch.zeros(5, 4)
    with pytest.raises(ValueError, match=r"^values has shape \[4, 4\]; expected \[tokens = 5, wid"):
        diff_extract(five, four, five, four, block=2)
