"""A prefill engine that is started anew finds the sessions of the one before it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from td_serve.config import EngineConfig
from td_serve.engine.host import EngineHost
from td_serve.engine.local import LocalEngines
from td_serve.types import Rule, RuleName
from tests.engine.rig import CONVERSATIONS, ENGINE, NIXL, Oracle, engine_processes
from tests.engine.round_rig import FULL, Shared, is_blended, play, round_of
from tests.redis_server import Redis

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

FIRST = Rule(name=RuleName.FIRST_K, k=5)


@pytest.fixture(scope="module")
def decode(tiny: Path) -> Iterator[EngineHost]:
    host = EngineHost.start("decode", str(tiny), ENGINE, NIXL, CONVERSATIONS)
    yield host
    host.close()


def prefill(model: Path, decode: EngineHost, engine: EngineConfig) -> LocalEngines:
    host = EngineHost.start("prefill", str(model), engine, NIXL, CONVERSATIONS, keeper=decode)
    return LocalEngines([host], [decode])


async def until_still(folder: Path) -> None:
    """Nothing has been written there for a second."""
    before: list[tuple[Path, int]] = []
    async with asyncio.timeout(30):
        while not before or before != written(folder):
            before = written(folder)
            await asyncio.sleep(1)


def written(folder: Path) -> list[tuple[Path, int]]:
    return [(path, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.data"))]


@pytest.mark.parametrize(
    ("where", "private"),
    [("folder", "lossless"), ("redis", "int8")],
)
async def test_who_comes_after_one_that_has_ended_has_what_it_had(
    tiny: Path, decode: EngineHost, tmp_path: Path, redis: Redis, where: str, private: str
) -> None:
    place = f"fs://{tmp_path}/tier" if where == "folder" else redis.url
    engine = msgspec.structs.replace(ENGINE, pass_store_below=[place], pass_store_private=private)
    shared = Shared(seed=3)
    members = [shared.member(history, 100 * history) for history in (1, 40, 131)]
    before = engine_processes()
    engines = prefill(tiny, decode, engine)
    answers, handovers = await play(engines, round_of(shared, members, FIRST))
    assert all(map(is_blended, handovers.values()))
    if where == "folder":
        await until_still(tmp_path / "tier")
        for process in engine_processes() - before:
            process.kill()
    engines.hosts[0].close()

    engines = prefill(tiny, decode, engine)
    try:
        again, handovers = await play(engines, round_of(shared, members, FIRST))
        if private == "lossless":
            assert again == answers
        for _, member in members:
            counted = handovers[member.request_id].blended
            assert counted is not None
            assert counted.local == len(member.token_ids), "all of it was there"
    finally:
        engines.hosts[0].close()


async def test_what_is_spoilt_or_not_there_costs_only_the_time(
    tiny: Path, decode: EngineHost, oracle: Oracle, tmp_path: Path
) -> None:
    """Of two places one is not there at all, and of the other nothing can be read any more."""
    places = ["redis://127.0.0.1:9", f"fs://{tmp_path}/tier"]
    engine = msgspec.structs.replace(ENGINE, pass_store_below=places)
    shared = Shared(seed=4)
    members = [shared.member(history, 100 * history) for history in (1, 40, 131)]
    wanted = [oracle.answer(request.prompt_token_ids) for request, _ in members]
    for is_spoilt in (False, True):
        engines = prefill(tiny, decode, engine)
        try:
            answers, handovers = await play(engines, round_of(shared, members, FULL))
        finally:
            engines.hosts[0].close()
        assert answers == wanted
        assert all(map(is_blended, handovers.values()))
        counted = [one.blended for one in handovers.values() if one.blended is not None]
        assert not is_spoilt or not any(one.local for one in counted)
        for path in (tmp_path / "tier").glob("*.data"):
            path.write_bytes(path.read_bytes()[:-1])
