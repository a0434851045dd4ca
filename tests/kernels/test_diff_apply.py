"""Blocks written over others: all of theirs, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_kernels.blocks import block_count, block_tokens
from td_kernels.diff_apply import diff_apply, diff_apply_kv, reference
from td_kernels.diff_extract import diff_extract
from tests.kernels.tensors import (
    any_layouts,
    assert_same,
    assert_untouched_around,
    laid,
    poisoned,
    properties,
    random,
    seeds,
    stored,
    unchecked,
)


@st.composite
def diffs(draw: st.DrawFn) -> dict[str, Any]:
    """Two planes of NaN, and rows for some of their blocks."""
    tokens, block, dtype = draw(st.integers(0, 13)), draw(st.integers(1, 6)), draw(stored)
    chosen = [index for index in range(block_count(tokens, block)) if draw(st.booleans())]
    indices = torch.tensor(chosen, dtype=torch.int64)
    rows, seed = len(block_tokens(indices, tokens, block)), draw(seeds)
    widths = draw(st.integers(0, 20)), draw(st.integers(0, 40))
    return {
        "planes": [poisoned(tokens, width, dtype=dtype) for width in widths],
        "rows": [random(seed, rows, width, dtype=dtype) for width in widths],
        "indices": indices,
        "block": block,
    }


@properties
@given(diffs(), any_layouts, any_layouts)
def test_blocks_are_written(device: str, diff: dict[str, Any], layout: str, of_rows: str) -> None:
    indices, block = diff["indices"], diff["block"]
    expected = [plane.clone() for plane in diff["planes"]]
    reference.apply(list(zip(expected, diff["rows"], strict=True)), indices, block)
    rows = [laid(some, of_rows, device) for some in diff["rows"]]
    together = [laid(plane, layout, device) for plane in diff["planes"]]
    diff_apply_kv(*together, indices.to(device), *rows, block=block)
    alone = [laid(plane, layout, device) for plane in diff["planes"]]
    for plane, some in zip(alone, rows, strict=True):
        diff_apply(plane, indices.to(device), some, block=block)
    for made in (together, alone):
        for plane, wanted in zip(made, expected, strict=True):
            assert_same(plane, wanted)
            assert_untouched_around(plane)


@properties
@given(st.integers(0, 13), st.integers(1, 6), stored, st.sets(st.integers(0, 12)), seeds)
def test_what_is_extracted_restores_the_mirror(
    device: str, tokens: int, block: int, dtype: torch.dtype, changed: set[int], seed: int
) -> None:
    master = [random(seed + one, tokens, 5, dtype=dtype).to(device) for one in range(2)]
    mirror = [plane.clone() for plane in master]
    for token in changed & set(range(tokens)):
        plane = mirror[token % 2]
        plane[token] = random(seed + token, 5, dtype=dtype).to(device)
    indices = diff_extract(*mirror, *master, block=block)
    places = block_tokens(indices, tokens, block)
    made = [plane.clone() for plane in master]
    diff_apply_kv(
        *made,
        indices,
        *(
            torch.stack([plane[at] for at in places.tolist()]) if len(places) else plane[:0]
            for plane in mirror
        ),
        block=block,
    )
    for plane, wanted in zip(made, mirror, strict=True):
        assert_same(plane, wanted)


def test_numbers_far_apart_are_found(device: str) -> None:
    memory = torch.empty(2**31 + 40, dtype=torch.uint8, device=device)
    far = memory.as_strided((5, 4), (2**29 + 7, 1))
    near = random(3, 5, 4, dtype=torch.uint8).to(device)
    diff_apply(far, torch.tensor([0, 2], device=device), near[[0, 1, 4]], block=2)
    assert_same(far[4], near[4])
    diff_apply(near, torch.tensor([0], device=device), far[4:], block=1)
    assert_same(near[0], far[4])


def good() -> dict[str, Any]:
    return {
        "keys": torch.zeros(8, 4),
        "values": torch.zeros(8, 5),
        "indices": torch.tensor([0, 2]),
        "key_rows": torch.zeros(5, 4),
        "value_rows": torch.zeros(5, 5),
        "block": 3,
    }


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("keys", torch.zeros(8), r"keys has shape \[8\]; expected \[tokens, width\]"),
        ("keys", torch.zeros(8, 4).int(), "keys is torch.int32; expected torch.float32 or"),
        ("values", torch.zeros(7, 5), r"value_rows has 5 rows; expected 4, for 2 blocks of 3 out "),
        ("values", torch.zeros(8, 4), r"value_rows has shape \[5, 5\]; expected \[rows, width = 4"),
        ("indices", torch.tensor([[0, 2]]), r"indices has shape \[1, 2\]; expected \[blocks\]"),
        ("indices", torch.tensor([0, 2]).int(), "indices is torch.int32; expected torch.int64"),
        ("indices", torch.tensor([0, 3]), "indices has 3 in it; expected 0 to 2"),
        ("indices", torch.tensor([-1, 2]), "indices has -1 in it; expected 0 to 2"),
        ("indices", torch.tensor([2, 0]), "indices do not ascend; expected each block once"),
        ("indices", torch.tensor([2, 2]), "indices do not ascend; expected each block once"),
        ("indices", torch.tensor([0, 1]), "key_rows has 5 rows; expected 6, for 2 blocks of 3 "),
        ("key_rows", torch.zeros(6, 4), "key_rows has 6 rows; expected 5, for 2 blocks of 3 out"),
        ("key_rows", torch.zeros(5, 3), r"key_rows has shape \[5, 3\]; expected \[rows, width = 4"),
        ("key_rows", torch.zeros(5, 4).half(), "key_rows is torch.float16; expected torch.float3"),
        ("value_rows", torch.zeros(5, 5, device="meta"), "value_rows is on meta; expected cpu"),
        ("block", 0, "block is 0; expected 1 or more"),
    ],
)
def test_wrong_arguments_are_named(name: str, wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        diff_apply_kv(**{**good(), name: wrong})


def test_keys_and_values_are_of_the_same_tokens() -> None:
    with pytest.raises(ValueError, match=r"^values has shape \[9, 5\]; expected \[tokens = 8, wid"):
        diff_apply_kv(
            torch.zeros(8, 4),
            torch.zeros(9, 5),
            torch.tensor([0]),
            torch.zeros(3, 4),
            torch.zeros(3, 5),
            block=3,
        )


@unchecked
def test_blocks_that_nobody_has_checked_are_not_written() -> None:
    from td_kernels.diff_apply import triton

    plane = laid(poisoned(4, 3, dtype=torch.float32), "offset", "cpu")
    rows = random(1, 8, 3)
    triton.apply([(plane, rows)], torch.tensor([-1, 1, 2, 2**40]), 2)
    assert_same(plane[2:], rows[2:4])
    assert plane[:2].isnan().all()
    assert_untouched_around(plane)
