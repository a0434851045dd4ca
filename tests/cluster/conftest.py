"""What several deployments are made of."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights: starts fast, and fits beside the real one."""
    from td_serve.models.random_model import write_random

    path = tmp_path_factory.mktemp("models") / "tiny"
    write_random(path, like="llama", layers=2)
    return path
