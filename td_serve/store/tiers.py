"""Lower tiers by LMCache's storage backends: a folder (`fs:///path`), Redis (`redis://host:port`).

LMCache's connectors are coroutines; they run in a loop of their own, in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")  # it is read when LMCache is imported

from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from td_serve.errors import TierDown
from td_serve.store.below import Tier

log = logging.getLogger(__name__)

_TRIMMED = 0.9
"""Of its budget, what a folder is brought down to: not every write shall look through it."""

_WRITING = "writing-"
_LEFT_S = 600.0
"""A folder of objects being written in which nothing has changed for so long is nobody's."""

_PASSWORD = re.compile(r"//[^/]*@")

T = TypeVar("T")


class LmcacheTier:
    """Bytes by name at a URL that LMCache has a connector for.

    An answer must come in `patience_s`; one to a question (`get`, `has`), for which a round waits,
    in a third of it. `settings` are LMCache's own. Raises TierDown from every call, and when it is
    not there at all. What LMCache cannot read is not there.
    """

    def __init__(self, url: str, patience_s: float = 10.0, **settings: str) -> None:
        self._place = _PASSWORD.sub("//…@", url)
        self._patience_s = patience_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="td-tier", daemon=True)
        self._thread.start()
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False, extra_config={"save_chunk_meta": True, **settings}
        )
        # LMCache asks what a chunk of KV is like; ours are bytes, of any length.
        metadata = LMCacheMetadata(
            model_name="td_serve",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=(1, 2, config.chunk_size, 1, 1),
            chunk_size=config.chunk_size,
        )
        self._memory = LocalCPUBackend(config, metadata, memory_allocator=AdHocMemoryAllocator())
        try:
            self._connector = self._run(self._open(url, config, metadata))
            self.has("00")  # or the first to notice would be a request
        except BaseException:
            self._end()
            raise

    async def _open(self, url: str, config: LMCacheEngineConfig, metadata: LMCacheMetadata) -> Any:
        return CreateConnector(url, self._loop, self._memory, config, metadata)

    def put(self, name: str, data: bytes) -> None:
        one = self._memory.allocate([torch.Size([len(data)])], [torch.uint8], MemoryFormat.KV_2LTD)
        memoryview(one.byte_array).cast("B")[:] = data
        self._run(self._connector.put(_key(name), one))

    def get(self, name: str) -> bytes | None:
        one = self._run(self._connector.get(_key(name)), self._patience_s / 3)
        if one is None:
            return None
        data = bytes(one.byte_array)
        one.ref_count_down()
        return data

    def has(self, name: str) -> bool:
        return bool(self._run(self._connector.exists(_key(name)), self._patience_s / 3))

    def close(self) -> None:
        # LMCache's own `close` of its Redis connector waits in the loop for the loop.
        self._end()

    def _end(self) -> None:
        if self._loop.is_closed():
            return
        with contextlib.suppress(TierDown):
            self._run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._patience_s)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T], patience_s: float | None = None) -> T:
        patience_s = patience_s or self._patience_s
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(patience_s)
        except TimeoutError as error:
            future.cancel()
            raise TierDown(f"{self._place}: no answer in {patience_s:.1f} s") from error
        except Exception as error:
            raise TierDown(f"{self._place}: {error!r}") from error


class FolderTier(LmcacheTier):
    """A folder of this machine's, which holds about `budget_bytes` at most: what has not been used
    for longest goes. Several processes may share it, if each has the same budget."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise TierDown(f"fs://{folder}: {error}") from error
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._writing = f"{_WRITING}{os.getpid()}-{uuid.uuid4().hex}"
        # LMCache wants a host and a port; and where processes write the same, one would take away
        # what another is still writing.
        super().__init__(f"fs://localhost:1{folder}", fs_connector_relative_tmp_dir=self._writing)
        self._written = 0
        self._trim()

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder / self._writing, ignore_errors=True)

    def put(self, name: str, data: bytes) -> None:
        super().put(name, data)
        self._written += len(data)
        if self._bytes + self._written > self._budget_bytes:
            self._trim()

    def has(self, name: str) -> bool:
        return self._used(name) if super().has(name) else False

    def get(self, name: str) -> bytes | None:
        self._used(name)
        return super().get(name)

    def _used(self, name: str) -> bool:
        """Note that it was used just now, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._folder / f"{_key(name).to_string()}.data")
            return True
        return False

    def _trim(self) -> None:
        """Look at what is there, and remove what is too much."""
        files = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process removes, too
                status = path.stat()
                if path.name.startswith(_WRITING):
                    self._sweep(path, status.st_mtime)
                else:
                    files.append((status.st_mtime, status.st_size, path))
        self._bytes = sum(size for _, size, _ in files)
        self._written = 0
        if self._bytes <= self._budget_bytes:
            return
        for _, size, path in sorted(files):
            if self._bytes <= _TRIMMED * self._budget_bytes:
                break
            path.unlink(missing_ok=True)
            self._bytes -= size

    def _sweep(self, path: Path, changed: float) -> None:
        """Remove what a process was writing that was killed long ago."""
        if path.name != self._writing and time.time() - changed > _LEFT_S:
            shutil.rmtree(path, ignore_errors=True)


class Resting:
    """A tier that is left alone for `pause_s` after it has failed: what waits for it waits with all
    requests. It gives and takes nothing then."""

    def __init__(self, tier: Tier, pause_s: float = 30.0) -> None:
        self._tier = tier
        self._pause_s = pause_s
        self._not_before = 0.0

    def put(self, name: str, data: bytes) -> None:
        self._try(lambda: self._tier.put(name, data), None)

    def get(self, name: str) -> bytes | None:
        return self._try(lambda: self._tier.get(name), None)

    def has(self, name: str) -> bool:
        """Whether there is no use in putting it there."""
        return self._try(lambda: self._tier.has(name), True)

    def close(self) -> None:
        self._tier.close()

    def _try(self, do: Callable[[], T], otherwise: T) -> T:
        if time.monotonic() < self._not_before:
            return otherwise
        try:
            return do()
        except TierDown as error:
            self._not_before = time.monotonic() + self._pause_s
            log.warning("%s; it is left alone for %.0f s", error, self._pause_s)
            return otherwise


class Tiers:
    """Tiers one below the other: what is put, all get; the first that has something gives it."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers

    def put(self, name: str, data: bytes) -> None:
        for tier in self._tiers:
            tier.put(name, data)

    def get(self, name: str) -> bytes | None:
        found = (tier.get(name) for tier in self._tiers)
        return next((data for data in found if data is not None), None)

    def has(self, name: str) -> bool:
        return all(tier.has(name) for tier in self._tiers)

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()


def open_tiers(urls: Sequence[str], folder_bytes: int) -> Tier | None:
    """The tiers at these URLs, the fastest first, but for those that are not there; None if none
    is."""
    found = []
    for url in urls:
        try:
            found.append(Resting(_open(url, folder_bytes)))
        except TierDown as error:
            log.error("nothing is kept there: %s", error)
    return Tiers(found) if found else None


def _open(url: str, folder_bytes: int) -> Tier:
    scheme, _, rest = url.partition("://")
    return FolderTier(Path(rest), folder_bytes) if scheme == "fs" else LmcacheTier(url)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _key(name: str) -> CacheEngineKey:
    return CacheEngineKey("td_serve", 1, 0, int(name, 16), torch.uint8)
