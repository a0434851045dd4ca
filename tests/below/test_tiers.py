"""Lower tiers: bytes by name, for good, within a budget; and when they are not there."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from td_serve.errors import StoreError, TierDown
from td_serve.store.below import Tier
from td_serve.store.objects import decode
from td_serve.store.records import KvAbout
from td_serve.store.tiers import FolderTier, LmcacheTier, Resting, Tiers, open_tiers
from tests.redis_server import Redis


def name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_what_was_left_half_written_long_ago_goes(tmp_path: Path) -> None:
    for left, age_s in (("writing-1-a", 3600), ("writing-1-b", 0)):
        (tmp_path / "tier" / left).mkdir(parents=True)
        (tmp_path / "tier" / left / "some.data").write_bytes(b"half")
        changed = time.time() - age_s
        os.utime(tmp_path / "tier" / left, (changed, changed))
    FolderTier(tmp_path / "tier", 2**20).close()
    assert [path.name for path in (tmp_path / "tier").iterdir()] == ["writing-1-b"]


@pytest.mark.parametrize("size", [1, 31, 4097, 3_000_001])
def test_what_is_put_is_there(tier: Tier, size: int) -> None:
    data = os.urandom(size)
    assert not tier.has(name(f"a{size}"))
    assert tier.get(name(f"a{size}")) is None
    tier.put(name(f"a{size}"), data)
    assert tier.has(name(f"a{size}"))
    assert tier.get(name(f"a{size}")) == data
    tier.put(name(f"a{size}"), data[:1])
    assert tier.get(name(f"a{size}")) == data[:1]


def test_a_folder_is_as_it_was_when_it_is_opened_again(tmp_path: Path) -> None:
    first = FolderTier(tmp_path / "tier", 2**20)
    first.put(name("a"), b"some")
    first.close()
    again = FolderTier(tmp_path / "tier", 2**20)
    assert again.get(name("a")) == b"some"
    again.close()


def test_of_a_folder_that_is_full_goes_what_was_not_used_for_longest(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path / "tier", 100_000)
    for number in range(9):
        tier.put(name(f"{number}"), bytes(10_000))
        place = next(tmp_path.glob(f"tier/*{name(str(number)).lstrip('0')}*"))
        os.utime(place, (number, number))
    assert tier.get(name("0"))
    for number in range(9, 12):
        tier.put(name(f"{number}"), bytes(10_000))
    left = {number for number in range(12) if tier.has(name(f"{number}"))}
    assert 0 in left
    assert {1, 2}.isdisjoint(left)
    assert sum(path.stat().st_size for path in tmp_path.glob("tier/*.data")) <= 100_000
    tier.close()
    # And so it is when somebody with less room opens it.
    FolderTier(tmp_path / "tier", 30_000).close()
    assert sum(path.stat().st_size for path in tmp_path.glob("tier/*.data")) <= 30_000


def test_a_place_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierDown, match=r"fs:///.*file"):
        FolderTier(tmp_path / "file", 2**20)
    with pytest.raises(TierDown, match=r"redis://127\.0\.0\.1:9"):
        LmcacheTier("redis://127.0.0.1:9")
    assert open_tiers(["redis://127.0.0.1:9", f"fs://{tmp_path}/file"], 2**20) is None


def test_a_server_that_stands_still_is_not_waited_for_long_and_no_password_is_told(
    redis: Redis,
) -> None:
    with pytest.raises(TierDown, match=r"//…@127\.0\.0\.1:9") as refused:
        LmcacheTier("redis://somebody:secret@127.0.0.1:9")
    assert "secret" not in str(refused.value)
    still = LmcacheTier(redis.url, patience_s=0.3)
    redis.stop()
    try:
        for ask in (lambda: still.get(name("a")), lambda: still.put(name("a"), b"some")):
            with pytest.raises(TierDown, match="no answer in"):
                ask()
    finally:
        redis.go_on()
    still.close()


def test_what_one_tier_lacks_another_has(tmp_path: Path, redis: Redis) -> None:
    folder, server = FolderTier(tmp_path / "tier", 2**20), LmcacheTier(redis.url)
    both = Tiers([folder, server])
    both.put(name("both"), b"some")
    server.put(name("lower"), b"other")
    assert folder.get(name("both")) == server.get(name("both")) == b"some"
    assert both.get(name("lower")) == b"other"
    assert not both.has(name("lower"))
    both.close()


def test_a_server_that_dies_costs_what_it_had_and_is_asked_again(tmp_path: Path) -> None:
    redis = Redis(tmp_path)
    one = LmcacheTier(redis.url, patience_s=5)
    tier = Resting(one, pause_s=0)
    tier.put(name("a"), b"some")
    redis.kill()
    with pytest.raises(TierDown, match="redis://"):
        one.get(name("a"))
    tier.put(name("b"), b"other")
    assert tier.get(name("a")) is None
    assert tier.has(name("a")), "there is no use in putting it there"
    redis.start()
    assert tier.get(name("a")) is None
    assert not tier.has(name("a"))
    tier.put(name("a"), b"some")
    assert tier.get(name("a")) == b"some"
    tier.close()
    redis.kill()


WRITER = """
import sys, torch
from pathlib import Path
from td_serve.store.kv import KV
from td_serve.store.objects import encode
from td_serve.store.records import contents
from td_serve.store.tiers import FolderTier
tier = FolderTier(Path(sys.argv[1]), 2**30)
for number in range(10**6):
    kv = KV([torch.full((400, 512), float(number))], [torch.zeros(400, 512)])
    tier.put(f"{number % 7 + 1:x}", encode(*contents(kv)))
    print(number, flush=True)
"""


def test_who_is_killed_while_writing_leaves_whole_objects_or_none(tmp_path: Path) -> None:
    for round_ in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path / "tier")]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for line in writer.stdout:
            if line.startswith(f"{20 + 13 * round_}"):
                break
        writer.kill()
        writer.wait()
        writer.stdout.close()
        tier = FolderTier(tmp_path / "tier", 2**30)
        spoilt = 0
        for number in range(1, 8):
            data = tier.get(f"{number:x}")
            try:
                assert data is not None
                _, tensors = decode(data, KvAbout)
                assert len(tensors) == 2
            except StoreError:
                spoilt += 1
        assert spoilt == 0
        tier.close()
        left = list((tmp_path / "tier").glob("writing-*/*"))
        assert len(left) <= round_ + 1, "what each was writing"
