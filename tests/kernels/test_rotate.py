"""Turning keys: whatever turns them does what the reference does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_kernels.rotate import reference, rotate
from tests.kernels.tensors import (
    any_layouts,
    assert_close,
    assert_same,
    assert_untouched_around,
    floats,
    laid,
    poisoned,
    properties,
    random,
    rotary_table,
    seeds,
    unchecked,
)

POSITIONS = 40


@st.composite
def places(draw: st.DrawFn, tokens: int) -> torch.Tensor:
    numbers = st.integers(-1, POSITIONS - 1)
    return torch.tensor(
        draw(st.lists(numbers, min_size=tokens, max_size=tokens)), dtype=torch.int64
    )


@st.composite
def turns(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.sampled_from([2, 4, 6, 8, 10, 16]))
    tokens = draw(st.integers(0, 7))
    dtype = draw(floats)
    to = draw(places(tokens))
    from_ = draw(st.none() | places(tokens))
    if from_ is not None and draw(st.booleans()):
        stays = torch.arange(tokens) % 2 == 0
        from_ = torch.where(stays, to, from_)
    rotary = 2 * draw(st.integers(1, size // 2))
    scale = draw(st.sampled_from([1, 1.3, 0.6]))
    table = rotary_table(POSITIONS, rotary, scale).to(draw(floats))
    return {
        "keys": random(draw(seeds), tokens, draw(st.integers(1, 5)), size, dtype=dtype),
        "table": table,
        "to": to,
        "from_": from_,
        "neox": draw(st.booleans()),
    }


def referred(turn: dict[str, Any]) -> torch.Tensor:
    out = poisoned(*turn["keys"].shape, dtype=turn["keys"].dtype)
    reference.rotate(**turn, out=out)
    return out


def there(turn: dict[str, Any], device: str, layout: str) -> dict[str, Any]:
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in turn.items()
    }
    return {**moved, "keys": laid(turn["keys"], layout, device)}


@properties
@given(turns(), any_layouts, any_layouts)
def test_keys_are_turned(device: str, turn: dict[str, Any], layout: str, to_layout: str) -> None:
    keys = turn["keys"]
    given_keys = there(turn, device, layout)
    out = laid(poisoned(*keys.shape, dtype=keys.dtype), to_layout, device)
    assert rotate(**given_keys, out=out) is out
    assert_close(out, referred(turn), scale=8)
    assert_same(given_keys["keys"], keys)
    assert_untouched_around(out)


@properties
@given(turns(), any_layouts)
def test_keys_are_turned_in_place(device: str, turn: dict[str, Any], layout: str) -> None:
    moved = there(turn, device, layout)
    rotate(**moved, out=moved["keys"])
    assert_close(moved["keys"], referred(turn), scale=8)
    assert_untouched_around(moved["keys"])


@properties
@given(turns())
def test_without_an_output_there_is_a_new_one(device: str, turn: dict[str, Any]) -> None:
    moved = there(turn, device, "rows apart")
    assert_close(rotate(**moved), referred(turn), scale=8)
    assert_same(moved["keys"], turn["keys"])


@properties
@given(turns())
def test_what_stays_is_copied_bit_for_bit(device: str, turn: dict[str, Any]) -> None:
    odd = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf]).to(turn["keys"].dtype)
    keys = odd[torch.arange(turn["keys"].numel()) % 5].view_as(turn["keys"])
    moved = there({**turn, "keys": keys, "from_": turn["to"]}, device, "packed")
    assert_same(rotate(**moved), keys)


@properties
@given(turns())
def test_a_turn_back_undoes_a_turn(device: str, turn: dict[str, Any]) -> None:
    keys, table = turn["keys"].float(), turn["table"].float()
    turn = {**turn, "keys": keys, "table": table}
    moved = there(turn, device, "packed")
    moved["keys"] = rotate(**moved)
    start = torch.full_like(turn["to"], -1) if turn["from_"] is None else turn["from_"]
    moved["from_"], moved["to"] = turn["to"].to(device), start.to(device)
    assert_close(rotate(**moved), keys, scale=20)


def test_a_turn_is_the_one_that_the_angle_says(device: str) -> None:
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], device=device)
    keys = torch.tensor([[[3.0, 4.0, 5.0]]] * 4, device=device)
    to = torch.tensor([1, 2, 2, -1], device=device)
    from_ = torch.tensor([-1, -1, 1, 1], device=device)
    turned = rotate(keys, table, to, from_)
    assert turned[:, 0].tolist() == [[-4, 3, 5], [-3, -4, 5], [-4, 3, 5], [4, -3, 5]]


def test_only_the_difference_counts(device: str) -> None:
    """What is kept of a turn from 30 to 37 is a turn by 7."""
    table = rotary_table(POSITIONS, 8).to(device)
    keys = random(1, 3, 2, 8).to(device)
    at = torch.full((3,), 30, device=device)
    seven = rotate(keys, table, torch.full_like(at, 7))
    assert_close(rotate(keys, table, at + 7, at), seven, scale=8)


def test_numbers_far_apart_are_found(device: str) -> None:
    """Farther than 32 bits count; only what is touched takes memory."""
    far = 2**29 + 7
    memory = torch.empty(4 * far + 8, dtype=torch.bfloat16, device=device)
    keys = memory.as_strided((5, 1, 4), (far, 4, 1))
    keys.copy_(random(2, 5, 1, 4, dtype=torch.bfloat16))
    table = rotary_table(POSITIONS, 4)
    to = torch.arange(5)
    expected = referred({"keys": keys.cpu(), "table": table, "to": to, "from_": None, "neox": True})
    rotate(keys, table.to(device), to.to(device), out=keys)
    assert_close(keys, expected, scale=8)


def good() -> dict[str, Any]:
    return {
        "keys": torch.zeros(3, 2, 8),
        "table": torch.ones(9, 6),
        "to": torch.zeros(3, dtype=torch.int64),
        "from_": torch.zeros(3, dtype=torch.int64),
    }


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("keys", torch.zeros(3, 16), r"keys has shape \[3, 16\]; expected \[tokens, heads, size\]"),
        (
            "keys",
            torch.zeros(3, 2, 8).to(torch.float8_e5m2),
            "keys is torch.float8_e5m2, which can",
        ),
        (
            "keys",
            torch.zeros(3, 2, 8, dtype=torch.uint8),
            "keys is torch.uint8, which cannot be tu",
        ),
        ("table", torch.ones(9), r"table has shape \[9\]; expected \[positions, rotary_size\]"),
        (
            "table",
            torch.ones(9, 5),
            "table has 5 columns; expected an even number of them, at most",
        ),
        ("table", torch.ones(9, 10), "table has 10 columns; expected .* at most 8"),
        ("table", torch.ones(9, 0), "table has 0 columns"),
        ("table", torch.ones(9, 6).long(), "table is torch.int64; expected torch.float32 or"),
        ("table", torch.ones(6, 9).T, "table has stride 9 in its last dimension; expected 1"),
        ("to", torch.zeros(2, dtype=torch.int64), r"to has shape \[2\]; expected \[tokens = 3\]"),
        ("to", torch.zeros(3, dtype=torch.int32), "to is torch.int32; expected torch.int64"),
        ("to", torch.tensor([0, 9, 0]), "to has 9 in it; expected -1 to 8"),
        ("from_", torch.zeros(3), "from_ is torch.float32; expected torch.int64"),
        ("from_", torch.tensor([0, 1, -2]), "from_ has -2 in it; expected -1 to 8"),
        ("from_", torch.zeros(3, device="meta").long(), "from_ is on meta; expected cpu"),
        (
            "out",
            torch.zeros(3, 2, 9),
            r"out has shape .*; expected \[tokens = 3, heads = 2, size =",
        ),
        ("out", torch.zeros(3, 2, 8).half(), "out is torch.float16; expected torch.float32"),
    ],
)
def test_wrong_arguments_are_named(name: str, wrong: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        rotate(**{**good(), name: wrong})


@unchecked
def test_positions_that_nobody_has_checked_give_nan() -> None:
    from td_kernels.rotate import triton

    keys = random(3, 4, 2, 8)
    to, from_ = torch.tensor([9, 1, 1, 2]), torch.tensor([1, 1, 2**40, -1])
    out = torch.zeros_like(keys)
    triton.rotate(keys, rotary_table(9, 8), to, from_, True, out)
    assert out.isnan().flatten(1).all(1).tolist() == [True, False, True, False]
