"""Work that nobody waits for: kept from being collected, its expected failures ignored."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from td_serve.errors import RequestError


class Tasks:
    """Tasks in the background of one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Start `work`. A RequestError ends it: whom it wanted has gone."""

        async def run() -> None:
            with contextlib.suppress(RequestError):
                await work

        task = asyncio.get_running_loop().create_task(run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def drain(self) -> None:
        """Wait until nothing runs any more."""
        while self._running:
            await asyncio.wait(self._running)
