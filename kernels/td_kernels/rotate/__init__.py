"""Turn keys from one position to another.

Rotary embedding (arXiv 2104.09864) turns pairs of a key's numbers by angles that grow with its
position. Reused keys stand at other positions than they were computed for, or are kept before any
rotation (TokenDance, arXiv 2604.03143, section 4.2: RoPE recovery).
"""

from __future__ import annotations

import torch

from td_kernels import checks
from td_kernels.dispatch import uses_triton


def rotate(
    keys: torch.Tensor,
    table: torch.Tensor,
    to: torch.Tensor,
    from_: torch.Tensor | None = None,
    *,
    neox: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`keys`, [tokens, heads, size], turned to positions `to` from positions `from_`.

    `table` is [positions, rotary size]: cosines, then sines, as in vLLM's `cos_sin_cache`. It may
    be scaled (YaRN, arXiv 2309.00071): keys at a position are scaled, too. `to` and `from_` are
    int64, [tokens]; -1 is before rotation, and so is all of `from_` where it is None. A pair is
    (i, i + rotary size / 2) if `neox`, else (2i, 2i + 1); numbers behind the rotary size stay as
    they are.

    Computed in float32 and rounded once. Keys that stand where they are to stand are copied, bit
    for bit. Returns `out`, which is `keys` itself (turned in place) or shares no memory with it;
    new memory where it is None.

    Raises ValueError. Positions that the table lacks are found on a CPU alone; on CUDA, such keys
    become NaN.
    """
    checks.shaped("keys", keys, tokens=None, heads=None, size=None)
    check_turn("keys", keys, table, to, from_)
    if out is None:
        out = torch.empty_like(keys)
    else:
        checks.shaped("out", out, **dict(zip(("tokens", "heads", "size"), keys.shape, strict=True)))
        checks.same("out", out, keys)
    if not keys.numel():
        return out
    if uses_triton(keys):
        from td_kernels.rotate import triton

        with torch.cuda.device_of(keys):
            triton.rotate(keys, table, to, from_, neox, out)
    else:
        from td_kernels.rotate import cpu

        cpu.rotate(keys, table, to, from_, neox, out)
    return out


def check_turn(
    name: str,
    keys: torch.Tensor,
    table: torch.Tensor,
    to: torch.Tensor,
    from_: torch.Tensor | None,
    *,
    tokens: int | None = None,
    prefix: str = "",
) -> None:
    """Raises ValueError unless keys such as these, `tokens` of them, can be turned so.

    None: these. `name` is theirs; what the other arguments are called begins with `prefix`.
    """
    if keys.dtype not in checks.FLOATS:
        raise ValueError(
            f"{name} is {keys.dtype}, which cannot be turned; expected"
            f" {' or '.join(map(str, checks.FLOATS))}"
        )
    checks.shaped(f"{prefix}table", table, positions=None, rotary_size=None)
    checks.typed(f"{prefix}table", table, *checks.FLOATS)
    checks.placed(f"{prefix}table", table, keys.device)
    checks.packed(f"{prefix}table", table)
    positions, rotary = table.shape
    if rotary % 2 or not 0 < rotary <= keys.shape[-1]:
        raise ValueError(
            f"{prefix}table has {rotary} columns; expected an even number of them, at most"
            f" {keys.shape[-1]}, which is the size of a key"
        )
    for place, standing in (("to", to), ("from_", from_)):
        if standing is not None:
            count = len(keys) if tokens is None else tokens
            checks.indices(f"{prefix}{place}", standing, count, keys.device)
            checks.within(f"{prefix}{place}", standing, -1, positions - 1)
