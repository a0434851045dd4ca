"""What public functions check of their arguments.

Each raises ValueError, which names the argument, what it is and what was expected.
"""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What can be computed with."""

STORED = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
"""What can be moved: vLLM keeps 8-bit floats as plain bytes, too."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def shaped(name: str, tensor: torch.Tensor, **expected: int | None) -> None:
    """Its dimensions are these, in this order; of None any number will do."""
    sizes = list(tensor.shape)
    known = list(expected.values())
    if len(sizes) == len(known) and all(
        number in (None, size) for number, size in zip(known, sizes, strict=True)
    ):
        return
    wanted = ", ".join(
        dimension if number is None else f"{dimension} = {number}"
        for dimension, number in expected.items()
    )
    raise ValueError(f"{name} has shape {sizes}; expected [{wanted}]")


def typed(name: str, tensor: torch.Tensor, *expected: torch.dtype) -> None:
    """Its dtype is one of these."""
    if tensor.dtype not in expected:
        raise ValueError(f"{name} is {tensor.dtype}; expected {' or '.join(map(str, expected))}")


def placed(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """It is on this device."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; expected {device}")


def packed(name: str, tensor: torch.Tensor) -> None:
    """The numbers of its last dimension follow one another in memory."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1")


def positive(name: str, value: int) -> None:
    """A count of something, at least 1."""
    if value < 1:
        raise ValueError(f"{name} is {value}; expected 1 or more")


def within(name: str, tensor: torch.Tensor, first: int, last: int) -> None:
    """Its values are from `first` to `last`. On CUDA nothing is looked at: that would wait for the
    device."""
    if tensor.is_cuda or not tensor.numel():
        return
    least, most = (int(value) for value in tensor.aminmax())
    if least < first or most > last:
        wrong = least if least < first else most
        raise ValueError(f"{name} has {wrong} in it; expected {first} to {last}")


def indices(
    name: str, tensor: torch.Tensor, count: int | None, device: torch.device, **dimension: None
) -> None:
    """int64, [count], on this device."""
    shaped(name, tensor, **dict.fromkeys(dimension or {"tokens": None}, count))
    typed(name, tensor, torch.int64)
    placed(name, tensor, device)


def same(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Of the same dtype on the same device."""
    typed(name, tensor, like.dtype)
    placed(name, tensor, like.device)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers, for what is moved or compared bit by bit."""
    return tensor.view(_BITS[tensor.element_size()])
