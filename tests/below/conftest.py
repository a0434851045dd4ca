"""Lower tiers for tests: a folder, and a Redis server's memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from td_serve.store.below import Tier
from td_serve.store.tiers import FolderTier, LmcacheTier


@pytest.fixture(params=["folder", "redis"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    opened: Tier
    if request.param == "folder":
        opened = FolderTier(tmp_path / "tier", 2**30)
    else:
        opened = LmcacheTier(request.getfixturevalue("redis").url)
    yield opened
    opened.close()
