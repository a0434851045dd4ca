"""Resident memory of a deployment's processes, by kind.

A page that several processes map counts once (PSS). What is mapped outside the deployment too, such
as the libraries of a second one on this machine, counts there for its share.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable

import psutil

GIB = 2**30
SAMPLE_S = 0.2

KINDS = ("ingress", "coordinator", "directory", "prefill", "decode", "engines", "ray")
_MARKS = {
    "EngineCore": "engines",
    ":Ingress": "ingress",
    ":RoundCoordinator": "coordinator",
    ":KVDirectory": "directory",
    ":PrefillReplica": "prefill",
    ":DecodeReplica": "decode",
}


def kind_of(title: str) -> str:
    """What a process is, by its title; `ray` is everything that runs none of our replicas."""
    return next((kind for mark, kind in _MARKS.items() if mark in title), "ray")


def resident_by_kind(processes: Iterable[psutil.Process]) -> dict[str, int]:
    """Bytes by kind of process. One that ends meanwhile does not count."""
    found: collections.Counter[str] = collections.Counter(dict.fromkeys(KINDS, 0))
    for process in processes:
        try:
            title = " ".join(process.cmdline())
            found[kind_of(title)] += process.memory_full_info().pss
        except psutil.Error:
            continue
    return dict(found)


class PeakMemory:
    """Samples memory from `with` to its end; `peak` is the sample with the largest sum."""

    def __init__(self, processes: Callable[[], Iterable[psutil.Process]]) -> None:
        self.peak: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._processes = processes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def gib(self) -> dict[str, float]:
        """The peak in GiB, by kind."""
        return {kind: round(size / GIB, 3) for kind, size in self.peak.items()}

    def _sample(self) -> None:
        while True:
            found = resident_by_kind(self._processes())
            if sum(found.values()) > sum(self.peak.values()):
                self.peak = found
            if self._over.wait(SAMPLE_S):
                return
