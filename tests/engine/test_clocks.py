"""Hosts whose clocks are an hour apart: no time of one's is ever compared with another's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from td_serve.config import DispatchSettings
from td_serve.dispatch import Dispatcher
from td_serve.engine.local import LocalEngines
from td_serve.metrics import silent_metrics
from tests.engine.rig import (
    CONVERSATIONS,
    ENGINE,
    NIXL,
    Oracle,
    make_request,
    new_conversation,
    some_tokens,
)

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

# Python runs this first in a process whose path has it. It says that it has run.
_SKEWED = """
import os, pathlib, time
_skew, _now, _now_ns = float(os.environ["TEST_SKEW_S"]), time.time, time.time_ns
time.time = lambda: _now() + _skew
time.time_ns = lambda: _now_ns() + int(_skew * 1e9)
pathlib.Path(__file__).with_name(f"ran-{os.getpid()}").touch()
"""


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[3600, -3600], ids=["ahead", "behind"]
)
async def engines(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalEngines]:
    """A decode engine whose clock is wrong; this process's and the prefill engine's are right."""
    path = tmp_path_factory.mktemp("skewed")
    (path / "sitecustomize.py").write_text(_SKEWED, "utf-8")
    env = {
        "PYTHONPATH": str(path),
        "TEST_SKEW_S": str(request.param),
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    }
    decode = msgspec.structs.replace(ENGINE, enable_prefix_caching=True, env=env)
    engines = LocalEngines.start(str(tiny), ENGINE, NIXL, CONVERSATIONS, decode_engine=decode)
    yield engines
    engines.close()
    assert list(path.glob("ran-*")), "no clock was wrong"


async def test_a_turn_is_read_from_a_host_whose_clock_is_an_hour_off(
    engines: LocalEngines, oracle: Oracle
) -> None:
    dispatcher = Dispatcher(engines, DispatchSettings(), silent_metrics())
    conversation, prompt = new_conversation(), some_tokens(150, 1)
    before = 0
    for number in range(3):
        request = make_request(prompt, conversation)
        handover = await engines.prefill(request)
        answer = [
            token
            async for delta in dispatcher.generate(request, handover)
            for choice in delta.choices
            for token in choice.token_ids
        ]
        assert answer == oracle.answer(prompt)
        assert handover.cached_tokens == before
        handle = engines.directory.find(conversation)
        assert handle is not None
        ttl_s = CONVERSATIONS.decoder_kv_blocks_ttl
        assert ttl_s - 30 < handle.remaining_s <= ttl_s
        before = len(prompt) + len(answer) - 1
        prompt = prompt + answer + some_tokens(10, number)
    assert await engines.forget(conversation)
