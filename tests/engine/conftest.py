"""One model and one plain engine for all of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.rig import LAYERS, Oracle


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights: what is tested here is whose KV is read, not what for."""
    from td_serve.models.random_model import write_random

    path = tmp_path_factory.mktemp("models") / "tiny"
    write_random(path, like="llama", layers=LAYERS, kv_heads=2, head_dim=64)
    return path


@pytest.fixture(scope="session")
def oracle(tiny: Path) -> Oracle:
    return Oracle(tiny)
