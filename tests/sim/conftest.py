"""What the tests of the client side share."""

from pathlib import Path

import pytest

from td_serve.sim.trace import Trace, read_trace

ROOT = Path(__file__).parents[2]
VILLAGE = ROOT / "examples" / "village.jsonl"


@pytest.fixture(scope="session")
def village() -> Trace:
    """Our own example: four agents, six rounds, all outputs recorded."""
    return read_trace(VILLAGE)
