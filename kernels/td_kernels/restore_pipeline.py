"""A mirror, layer after layer: while one is restored, the next one's master is on its way
(TokenDance, arXiv 2604.03143, section 4.4 and algorithm 1: two buffers that change roles)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from td_kernels.dispatch import uses_triton
from td_kernels.fused_restore import check, cpu, fused_restore
from td_kernels.planes import Planes, Turn


def restore_layers(
    masters: Sequence[Planes],
    patches: Sequence[Planes],
    source: torch.Tensor,
    slots: torch.Tensor,
    pages: Sequence[Planes],
    turn: Turn | None = None,
) -> None:
    """`fused_restore` for each layer; `source`, `slots` and `turn` are the same for all.

    Where pages are on CUDA, master and patch may be on the host: then they pass through one of two
    buffers, by a stream of their own. That overlaps where they are pinned. Nothing waits for the
    device: what is in host memory has to stay as it is until the current stream has got so far.
    Raises ValueError.
    """
    for name, layers in (("masters", masters), ("patches", patches)):
        if len(layers) != len(pages):
            raise ValueError(f"{name} has {len(layers)} layers; expected {len(pages)}, as pages")
    if not pages:
        return
    device = pages[0].keys.device
    is_here = all(plane.device == device for one in (*masters, *patches) for plane in one)
    if device.type == "cuda" and not is_here:
        with torch.cuda.device(device):
            _overlapped(masters, patches, source, slots, pages, turn)
        return
    if device.type != "cpu" or uses_triton(source):
        for master, patch, page in zip(masters, patches, pages, strict=True):
            fused_restore(master, patch, source, slots, page, turn)
        return
    for master, patch, page in zip(masters, patches, pages, strict=True):
        check(master, patch, source, slots, page, turn)
    plan = cpu.plan(source, slots, turn)
    for master, patch, page in zip(masters, patches, pages, strict=True):
        cpu.restore(master, patch, plan, page)


def _overlapped(
    masters: Sequence[Planes],
    patches: Sequence[Planes],
    source: torch.Tensor,
    slots: torch.Tensor,
    pages: Sequence[Planes],
    turn: Turn | None,
) -> None:
    restoring, copying = torch.cuda.current_stream(), torch.cuda.Stream()
    device = pages[0].keys.device
    buffers = [(_room(masters[0], device), _room(patches[0], device)) for _ in range(2)]
    loaded, restored = ([torch.cuda.Event() for _ in buffers] for _ in range(2))
    # The buffers' memory may have been another's, whom the current stream still works for.
    copying.wait_stream(restoring)
    try:
        for layer, page in enumerate(pages):
            one = layer % 2
            if layer >= 2:
                copying.wait_event(restored[one])
            with torch.cuda.stream(copying):
                master = _loaded(masters[layer], buffers[one][0], f"masters[{layer}]")
                patch = _loaded(patches[layer], buffers[one][1], f"patches[{layer}]")
            loaded[one].record(copying)
            restoring.wait_event(loaded[one])
            fused_restore(master, patch, source, slots, page, turn)
            restored[one].record(restoring)
    finally:
        # Whoever has the buffers' memory next waits for what is still on its way into it.
        restoring.wait_stream(copying)


def _room(planes: Planes, device: torch.device) -> Planes:
    """A buffer for planes like these."""
    return Planes(*(torch.empty(one.shape, dtype=one.dtype, device=device) for one in planes))


def _loaded(planes: Planes, room: Planes, name: str) -> Planes:
    """The planes where the buffer is: in it, unless they are on its device already."""
    here = []
    for part, plane, buffer in zip(planes._fields, planes, room, strict=True):
        if plane.device == buffer.device:
            here.append(plane)
            continue
        if plane.shape != buffer.shape or plane.dtype != buffer.dtype:
            raise ValueError(
                f"{name}.{part} is {plane.dtype}, {list(plane.shape)}; expected {buffer.dtype},"
                f" {list(buffer.shape)}, as in the first layer"
            )
        here.append(buffer.copy_(plane, non_blocking=True))
    return Planes(*here)
