"""Layers restored one after the other; from the host to a GPU, each beside the next one's copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from td_kernels import restore_pipeline
from td_kernels.fused_restore import reference
from td_kernels.planes import Planes, Turn
from td_kernels.restore_pipeline import restore_layers
from tests.kernels.tensors import assert_close, assert_same, poisoned, random, rotary_table

LAYERS, ROWS, HEADS, SIZE = 5, 6, 2, 8


def layers(rows: int, seed: int) -> list[Planes]:
    return [
        Planes(*(random(seed + 2 * layer + one, rows, HEADS, SIZE) for one in range(2)))
        for layer in range(LAYERS)
    ]


def mirror() -> dict[str, Any]:
    source = torch.tensor([0, -2, 5, 3, -1, 1])
    to = torch.arange(6) + 3
    return {
        "masters": layers(ROWS, 1),
        "patches": layers(2, 100),
        "source": source,
        "slots": torch.tensor([7, 2, 0, -1, 3, 6]),
        "turn": Turn(rotary_table(12, SIZE), to, torch.where(source < 0, to, -1)),
    }


def pages(device: str = "cpu") -> list[Planes]:
    shape = (2, 4, HEADS, SIZE)
    return [
        Planes(*(poisoned(*shape, dtype=torch.float32).to(device) for _ in range(2)))
        for _ in range(LAYERS)
    ]


def assert_restored(found: list[Planes]) -> None:
    given = mirror()
    expected = pages()
    for layer, (wanted, made) in enumerate(zip(expected, found, strict=True)):
        reference.restore(
            given["masters"][layer],
            given["patches"][layer],
            given["source"],
            given["slots"],
            wanted,
            given["turn"],
        )
        assert_close(made.keys, wanted.keys, scale=8)
        assert_same(made.values, wanted.values)


def test_all_layers_are_restored() -> None:
    found = pages()
    restore_layers(**mirror(), pages=found)
    assert_restored(found)


def test_a_mirror_without_layers_is_none() -> None:
    restore_layers([], [], torch.tensor([0]), torch.tensor([0]), [])


@pytest.mark.parametrize("name", ["masters", "patches"])
def test_layers_are_counted(name: str) -> None:
    given = mirror()
    given[name] = given[name][1:]
    with pytest.raises(ValueError, match=f"^{name} has 4 layers; expected 5, as pages"):
        restore_layers(**given, pages=pages())


class Streams:
    """Two streams on a host that does everything at once, and what each has been told, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, int]] = []
        self.events = 0
        self.on = "restoring"

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.on = self.on, stream.name
        yield
        self.on = before


def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    all_of_them = Streams()

    class Event:
        def __init__(self) -> None:
            self.number = all_of_them.events
            all_of_them.events += 1

        def record(self, stream: Any) -> None:
            all_of_them.log.append((stream.name, "record", self.number))

    class Stream:
        def __init__(self, name: str = "copying") -> None:
            self.name = name

        def wait_event(self, event: Event) -> None:
            all_of_them.log.append((self.name, "wait", event.number))

        def wait_stream(self, stream: Any) -> None:
            all_of_them.log.append((self.name, "wait for all", 0))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", all_of_them.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("restoring"))
    return all_of_them


def test_a_buffer_is_filled_when_it_is_free_and_read_when_it_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The streams' order, seen without a GPU: copies and restores log themselves among events."""
    seen = streams(monkeypatch)
    real_loaded, real_restore = restore_pipeline._loaded, restore_pipeline.fused_restore

    def loaded(planes: Planes, room: Planes, name: str) -> Planes:
        if name.startswith("masters"):
            seen.log.append((seen.on, "copy", int(name[8:-1])))
        here = real_loaded(planes, room, name)
        # On a host they would not be copied: planes are on the buffers' device already.
        return Planes(*(buffer.copy_(plane) for buffer, plane in zip(room, here, strict=True)))

    def restore(*arguments: Any) -> None:
        seen.log.append((seen.on, "restore", sum(what == "restore" for _, what, _ in seen.log)))
        real_restore(*arguments)

    monkeypatch.setattr(restore_pipeline, "_loaded", loaded)
    monkeypatch.setattr(restore_pipeline, "fused_restore", restore)
    found, given = pages(), mirror()
    restore_pipeline._overlapped(
        given["masters"], given["patches"], given["source"], given["slots"], found, given["turn"]
    )
    assert_restored(found)
    loaded_0, loaded_1, restored_0, restored_1 = range(4)
    expected: list[tuple[str, str, int]] = [("copying", "wait for all", 0)]
    for layer in range(LAYERS):
        full, free = ((loaded_0, restored_0), (loaded_1, restored_1))[layer % 2]
        if layer >= 2:
            expected.append(("copying", "wait", free))
        expected += [
            ("copying", "copy", layer),
            ("copying", "record", full),
            ("restoring", "wait", full),
            ("restoring", "restore", layer),
            ("restoring", "record", free),
        ]
    assert seen.log == [*expected, ("restoring", "wait for all", 0)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_layers_on_the_host_are_restored_on_a_gpu() -> None:
    given, found = mirror(), pages("cuda")
    for name in ("masters", "patches"):
        given[name] = [Planes(*(plane.pin_memory() for plane in one)) for one in given[name]]
    # One of them is on the device already, and stays as it is.
    given["masters"][0] = Planes(*(plane.cuda() for plane in given["masters"][0]))
    table, to, from_, _ = given["turn"]
    given["turn"] = Turn(table.cuda(), to.cuda(), from_.cuda())
    given["source"], given["slots"] = given["source"].cuda(), given["slots"].cuda()
    restore_layers(**given, pages=found)
    assert_restored(found)
    assert_same(given["masters"][0].keys, mirror()["masters"][0].keys)
