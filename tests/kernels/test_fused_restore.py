"""Mirrors restored into pages: fused and dense, both do what the reference does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_kernels.checks import FLOATS, bits
from td_kernels.fused_restore import dense_restore, fused_restore, reference
from td_kernels.planes import Planes, Turn
from tests.kernels.tensors import (
    LAYOUTS,
    assert_close,
    assert_same,
    assert_untouched_around,
    layouts,
    poisoned,
    properties,
    random,
    rotary_table,
    seeds,
    stored,
    unchecked,
)
from tests.kernels.tensors import laid as laid_out

POSITIONS = 30
PAGES = (
    "keys, then values",
    "block by block",
    "head by head",
    "alone",
    "each its own way",
    "numbers apart",
)
"""How pages lie in memory; the first three are vLLM's."""

restores = pytest.mark.parametrize("restore", [fused_restore, dense_restore])


def pages_of(layout: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Planes:
    """Pages of NaN, [blocks, block size, heads, size]."""
    blocks, block_size, heads, size = shape
    if layout == "keys, then values":
        memory = poisoned(2, *shape, dtype=dtype)
        return Planes(memory[0], memory[1])
    if layout == "block by block":
        memory = poisoned(blocks, 2, block_size, heads, size, dtype=dtype)
        return Planes(memory[:, 0], memory[:, 1])
    if layout == "head by head":
        memory = poisoned(blocks, heads, block_size, 2 * size, dtype=dtype).transpose(1, 2)
        return Planes(memory[..., :size], memory[..., size:])
    if layout == "alone":
        return Planes(poisoned(*shape, dtype=dtype), poisoned(*shape, dtype=dtype))
    if layout == "each its own way":
        memory = poisoned(heads, block_size, blocks, size + 1, dtype=dtype)
        return Planes(poisoned(*shape, dtype=dtype), memory.permute(2, 1, 0, 3)[..., 1:])
    memory = poisoned(*shape[:-1], 2 * size, dtype=dtype)
    return Planes(memory[..., ::2], memory[..., 1::2])


@st.composite
def mirrors(draw: st.DrawFn) -> dict[str, Any]:
    """One layer of a mirror, and where it goes; pages are still a layout and a shape."""
    dtype, seed, of_planes = draw(stored), draw(seeds), draw(st.tuples(*4 * [layouts]))
    heads, size = draw(st.integers(1, 5)), draw(st.sampled_from([2, 4, 6, 8, 16]))
    counts = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    blocks, block_size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    slots = draw(st.permutations(range(blocks * block_size)))
    tokens = draw(st.integers(0, len(slots) if sum(counts) else 0))
    left_out = draw(st.sets(st.integers(0, 30), max_size=2))
    slots = [-1 - at if at in left_out else slot for at, slot in enumerate(slots[:tokens])]
    numbers = st.integers(-counts[1], counts[0] - 1)
    source = draw(st.lists(numbers, min_size=tokens, max_size=tokens)) if tokens else []
    turn = None
    if dtype in FLOATS and draw(st.booleans()):
        positions = st.lists(st.integers(-1, POSITIONS - 1), min_size=tokens, max_size=tokens).map(
            lambda numbers: torch.tensor(numbers, dtype=torch.int64)
        )
        to = draw(positions)
        from_ = draw(st.sampled_from(["before rotation", "anywhere", "patch rows in place"]))
        turn = Turn(
            rotary_table(POSITIONS, 2 * draw(st.integers(1, size // 2)), draw(st.just(1.2))),
            to,
            {
                "before rotation": None,
                "anywhere": draw(positions),
                "patch rows in place": torch.where(torch.tensor(source).long() < 0, to, -1),
            }[from_],
            draw(st.booleans()),
        )
    return {
        "master": Planes(
            *(random(seed + one, counts[0], heads, size, dtype=dtype) for one in (0, 1))
        ),
        "patch": Planes(
            *(random(seed + one, counts[1], heads, size, dtype=dtype) for one in (2, 3))
        ),
        "source": torch.tensor(source, dtype=torch.int64),
        "slots": torch.tensor(slots, dtype=torch.int64),
        "turn": turn,
        "layouts": of_planes,
        "shape": (blocks, block_size, heads, size),
    }


def moved(mirror: dict[str, Any], device: str) -> dict[str, Any]:
    """The same on a device, in memory of its layouts; without pages."""
    turn = mirror["turn"]
    if turn is not None:
        turn = Turn(*(None if one is None else one.to(device) for one in turn[:3]), neox=turn.neox)
    there = [
        laid_out(plane, layout, device)
        for plane, layout in zip(
            (*mirror["master"], *mirror["patch"]), mirror["layouts"], strict=True
        )
    ]
    return {
        "master": Planes(*there[:2]),
        "patch": Planes(*there[2:]),
        **{name: mirror[name].to(device) for name in ("source", "slots")},
        "turn": turn,
    }


def restored(
    restore: Callable[..., None], mirror: dict[str, Any], pages: Planes, device: str
) -> Planes:
    """The pages, on a device, with the mirror in them."""
    there = Planes(*(_copied(plane, device) for plane in pages))
    restore(**moved(mirror, device), pages=there)
    return there


def _copied(view: torch.Tensor, device: str) -> torch.Tensor:
    """The same view of a copy of its memory."""
    memory = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).clone().to(device)
    return memory.as_strided(view.shape, view.stride(), view.storage_offset())


@restores
@properties
@given(mirrors(), st.sampled_from(PAGES))
def test_mirrors_are_restored(
    device: str, restore: Callable[..., None], mirror: dict[str, Any], layout: str
) -> None:
    pages = pages_of(layout, mirror["shape"], mirror["master"].keys.dtype)
    found = restored(restore, mirror, pages, device)
    expected = pages_of("alone", mirror["shape"], pages.keys.dtype)
    if len(mirror["source"]):
        reference.restore(
            **{name: mirror[name] for name in ("master", "patch", "source", "slots", "turn")},
            pages=expected,
        )
    assert_same(found.values, expected.values)
    if mirror["turn"] is None:
        assert_same(found.keys, expected.keys)
    else:
        assert_close(found.keys, expected.keys, scale=8)
    for plane in found:
        assert_untouched_around(plane)


@restores
def test_keys_and_values_may_share_their_memory(device: str, restore: Callable[..., None]) -> None:
    """As pages do, each written where the other is not."""
    memory = poisoned(2, 2, 4, 1, 2, dtype=torch.float32).to(device)
    rows = random(1, 4, 1, 2).to(device)
    slots = torch.tensor([7, -1, 0, 2], device=device)
    master, patch = Planes(rows[:2], rows[2:]), Planes(rows[2:], rows[:2])
    source = torch.tensor([1, 0, -1, -2], device=device)
    restore(master, patch, source, slots, Planes(memory[0], memory[1]))
    keys, values = memory.flatten(1, 2)[..., 0, :]
    written = [7, 0, 2]
    assert_same(keys[written], rows[[1, 2, 3], 0])
    assert_same(values[written], rows[[3, 0, 1], 0])
    assert int(memory.isnan().sum()) == memory.numel() - 12


@restores
@pytest.mark.parametrize("pages_layout", PAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_token_goes_to_its_slot(
    device: str, restore: Callable[..., None], layout: str, pages_layout: str
) -> None:
    mirror = {
        "master": Planes(random(1, 2, 3, 8), random(2, 2, 3, 8)),
        "patch": Planes(random(3, 1, 3, 8), random(4, 1, 3, 8)),
        "source": torch.tensor([1, -1]),
        "slots": torch.tensor([5, 1]),
        "turn": Turn(rotary_table(POSITIONS, 6), torch.tensor([5, 7]), torch.tensor([-1, 7])),
        "layouts": [layout, "packed", "offset", layout],
    }
    pages = pages_of(pages_layout, (3, 2, 3, 8), torch.float32)
    found = restored(restore, mirror, pages, device)
    master, patch = mirror["master"], mirror["patch"]
    assert_same(found.values[2, 1], master.values[1])
    assert_same(found.keys[2, 1, :, 6:], master.keys[1, :, 6:])
    assert_same(found.values[0, 1], patch.values[0])
    assert_same(found.keys[0, 1], patch.keys[0])
    for plane in found:
        assert plane.isnan().flatten(2).all(2).tolist() == [
            [True, False],
            [True] * 2,
            [True, False],
        ]


@restores
def test_one_token_alone(device: str, restore: Callable[..., None]) -> None:
    rows, nothing = torch.ones(1, 1, 2, device=device), torch.ones(0, 1, 2, device=device)
    at, page = torch.tensor([0], device=device), torch.zeros(1, 1, 1, 2, device=device)
    restore(Planes(rows, rows), Planes(nothing, nothing), at, at, Planes(page, page.clone()))
    assert page.flatten().tolist() == [1, 1]


@pytest.mark.parametrize("far", ["pages", "master", "patch"])
def test_numbers_far_apart_are_found(device: str, far: str) -> None:
    """Farther than 32 bits count; only what is touched takes memory."""
    memory = torch.empty(2**31 + 100, dtype=torch.uint8, device=device)
    apart = [memory[at:].as_strided((5, 2, 4), (2**29 + 7, 4, 1)) for at in (0, 8)]
    near = [random(at, 5, 2, 4, dtype=torch.uint8).to(device) for at in (1, 2)]
    order = torch.tensor([4, 2, 0, 1, 3], device=device)
    nothing = Planes(near[0][:0], near[1][:0])
    made = [torch.zeros_like(plane) for plane in near]
    if far == "pages":
        pages = Planes(*(plane[:, None] for plane in apart))
        fused_restore(Planes(*near), nothing, order, order, pages)
        made = apart
    else:
        for plane, numbers in zip(apart, near, strict=True):
            plane.copy_(numbers)
        pages = Planes(*(plane[:, None] for plane in made))
        rows, source = Planes(*apart), order if far == "master" else -1 - order
        both = (rows, nothing) if far == "master" else (nothing, rows)
        fused_restore(*both, source, order, pages)
    for plane, numbers in zip(made, near, strict=True):
        assert_same(plane, numbers)


def good() -> dict[str, Any]:
    return {
        "master": Planes(torch.zeros(5, 2, 4), torch.zeros(5, 2, 4)),
        "patch": Planes(torch.zeros(2, 2, 4), torch.zeros(2, 2, 4)),
        "source": torch.tensor([0, -2, 4]),
        "slots": torch.tensor([0, 5, -1]),
        "pages": Planes(torch.zeros(2, 3, 2, 4), torch.zeros(2, 3, 2, 4)),
        "turn": Turn(torch.ones(9, 4), torch.tensor([0, 1, 2])),
    }


def planes(keys: torch.Tensor, values: torch.Tensor | None = None) -> Planes:
    return Planes(keys, torch.zeros_like(keys) if values is None else values)


@restores
@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        (
            "pages",
            planes(torch.zeros(6, 2, 4)),
            r"pages.keys has shape .*; expected \[blocks, block",
        ),
        ("pages", planes(torch.zeros(2, 3, 2, 4).int()), "pages.keys is torch.int32; expected"),
        (
            "pages",
            planes(torch.zeros(2, 3, 2, 4), torch.zeros(2, 4, 2, 4)),
            r"pages.values has shape \[2, 4, 2, 4\]; expected \[blocks = 2, block_size = 3",
        ),
        (
            "pages",
            planes(torch.zeros(2, 3, 2, 4).to(torch.float8_e5m2)),
            "master.keys is torch.flo",
        ),
        (
            "master",
            planes(torch.zeros(5, 8)),
            r"master.keys has shape \[5, 8\]; expected \[rows, he",
        ),
        (
            "master",
            planes(torch.zeros(5, 2, 4), torch.zeros(4, 2, 4)),
            r"master.values has shape \[4, 2, 4\]; expected \[rows = 5, heads = 2, size = 4\]",
        ),
        ("patch", planes(torch.zeros(2, 2, 3)), r"patch.keys has shape .* size = 4\]"),
        (
            "patch",
            planes(torch.zeros(2, 2, 4).half()),
            "patch.keys is torch.float16; expected torch",
        ),
        (
            "patch",
            planes(torch.zeros(2, 4, 2).transpose(1, 2)),
            "patch.keys has stride 2 in its last dimension; expected 1",
        ),
        ("source", torch.zeros(3), "source is torch.float32; expected torch.int64"),
        ("source", torch.tensor([0, 5, 1]), "source has 5 in it; expected -2 to 4"),
        ("source", torch.tensor([0, -3, 1]), "source has -3 in it; expected -2 to 4"),
        ("slots", torch.tensor([1, 2]), r"slots has shape \[2\]; expected \[tokens = 3\]"),
        ("slots", torch.tensor([1, 6, -1]), "slots has 6 in it; expected"),
        (
            "turn",
            Turn(torch.ones(9, 4), torch.tensor([0, 1])),
            r"turn.to has shape \[2\]; expected \[tokens = 3\]",
        ),
        (
            "turn",
            Turn(torch.ones(9, 6), torch.zeros(3).long()),
            "turn.table has 6 columns; expecte",
        ),
        (
            "turn",
            Turn(torch.ones(9, 4), torch.tensor([0, 1, 2]), torch.tensor([0, 1, 9])),
            "turn.from_ has 9 in it; expected -1 to 8",
        ),
    ],
)
def test_wrong_arguments_are_named(
    restore: Callable[..., None], name: str, wrong: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        restore(**{**good(), name: wrong})


@restores
def test_bytes_cannot_be_turned(restore: Callable[..., None]) -> None:
    eight = {
        name: Planes(*(plane.to(torch.float8_e4m3fn) for plane in good()[name]))
        for name in ("master", "patch", "pages")
    }
    with pytest.raises(
        ValueError, match=r"^pages.keys is torch.float8_e4m3fn, which cannot be tur"
    ):
        restore(**{**good(), **eight})
    restore(**{**good(), **eight, "turn": None})


@unchecked
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rows_and_slots_that_nobody_has_checked(dtype: torch.dtype) -> None:
    """Rows that do not exist become NaN; slots that do not exist are left out."""
    from td_kernels.fused_restore import triton

    master, patch = (
        Planes(random(seed, 3, 1, 4, dtype=dtype), random(seed, 3, 1, 4, dtype=dtype))
        for seed in (1, 2)
    )
    pages = Planes(*(torch.zeros(2, 3, 1, 4).to(dtype) for _ in range(2)))
    source = torch.tensor([3, -4, 2, 0, -(2**40), 1])
    triton.restore(master, patch, source, torch.tensor([0, 1, 2, 6, 4, 2**40]), pages, None)
    for plane, one in zip(pages, master, strict=True):
        found = plane.float().view(6, 4)
        assert found.isnan().all(1).tolist() == [True, True, False, False, True, False]
        assert_same(bits(plane).view(6, 4)[2], bits(one)[2, 0])
        assert (found[[3, 5]] == 0).all()
