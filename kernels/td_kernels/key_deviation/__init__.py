"""How far keys are from others: what rules that go by deviation choose by (CacheBlend, arXiv
2405.16444; TokenDance, arXiv 2604.03143, section 4.2)."""

from __future__ import annotations

import torch

from td_kernels import checks
from td_kernels.dispatch import uses_triton


def key_deviation(here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Of each token, the squared distance from `there` to `here` and the squared length of `there`:
    float32, [2, tokens]. Both are [tokens, width].

    Their quotient is relative; where ranks have some of the heads each, both are summed up first.
    Differences are taken in float32. Raises ValueError.
    """
    checks.shaped("here", here, tokens=None, width=None)
    checks.typed("here", here, *checks.FLOATS)
    checks.shaped("there", there, tokens=here.shape[0], width=here.shape[1])
    checks.same("there", there, here)
    if uses_triton(here) and here.numel():
        from td_kernels.key_deviation import triton

        with torch.cuda.device_of(here):
            return triton.key_deviation(here, there)
    from td_kernels.key_deviation import cpu

    return cpu.key_deviation(here, there)
