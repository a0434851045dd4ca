"""What is kept below: found again, bit for bit, by whoever may, whole or not at all."""

from __future__ import annotations

import logging
import random
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from td_serve.store.below import Below, Tier
from td_serve.store.codecs import Codec, Codecs, Coded
from td_serve.store.families import CodedRun, History, Mirror, Rows, Run
from td_serve.store.rounds import CANONICAL, HISTORY, RoundStore
from td_serve.store.tiers import FolderTier
from tests.store.test_families import Turned, codecs, dense, kinds, kv, mirror

SHAPE = kv(1, 0).shape


def store_on(tier: Tier, space: str = "model", budget_bytes: int = 2**30) -> RoundStore:
    store = RoundStore(budget_bytes)
    store.below = Below(tier, space, SHAPE)
    return store


def sequence(tokens: int, seed: int, origin: str = "here") -> Run:
    return Run(list(range(tokens)), kv(tokens, seed), origin)


def behind_a_history(made: Mirror, tokens: int, coded: bool) -> Mirror:
    """The same mirror, its first tokens, which are its own, being a history's."""
    private, *diffs = made.own
    assert isinstance(private.kv, type(kv(1, 0)))
    begins = private.kv.part(0, tokens)
    ids = made.token_ids[:tokens]
    own = Rows(private.positions[tokens:], private.kv.part(tokens, private.kv.tokens))
    history = CodedRun(ids, Coded.of(begins, Codec.INT8, 1)) if coded else Run(ids, begins)
    return replace(made, history=history, history_tokens=tokens, own=(own, *diffs))


def same(one: History, other: History) -> bool:
    """Bit for bit."""
    if one.token_ids != other.token_ids or one.exact != other.exact:
        return False
    if isinstance(one, Mirror) and isinstance(other, Mirror):
        tokens = len(one.token_ids)
        pairs = zip(dense(one, 0, tokens), dense(other, 0, tokens), strict=True)
        is_same = all(torch.equal(some, others) for some, others in pairs)
        return is_same and one.rule == other.rule
    (some,), (others,) = (
        tuple(each.parts(Turned(), 0, 0, len(each.token_ids))) for each in (one, other)
    )
    return torch.equal(some.keys, others.keys) and torch.equal(some.values, others.values)


@given(kinds, kinds, codecs, st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_what_was_kept_is_found_by_the_next_engine(
    tier: Tier, first: list[str], then: list[str], how: Codecs, is_coded: bool
) -> None:
    canonical = sequence(50, 1)
    begun = mirror(canonical, first, 2).coded(Turned(), how)
    alone = Run([1, 2, 3], kv(3, 4))
    kept: dict[str, History] = {
        "begun": begun,
        "longer": begun.followed_by([*begun.token_ids, 7, 8], kv(2, 5)),
        "behind": behind_a_history(mirror(canonical, ["own"] * 4 + then, 3), 4, is_coded),
        "alone": alone,
        "coded": CodedRun([1, 2, 3], Coded.of(alone.kv, Codec.INT8, 1)),
    }
    space = uuid.uuid4().hex
    store = store_on(tier, space)
    store.keep(CANONICAL, "shared", canonical)
    for name, one in kept.items():
        store.keep(HISTORY, name, one)
    store.settle()

    again = store_on(tier, space)
    for name, one in kept.items():
        found, common = again.find(HISTORY, name, one.token_ids)
        assert common == len(one.token_ids)
        assert same(found, one)
    run, common = again.find_run(CANONICAL, "shared", canonical.token_ids)
    assert common == 50
    mirrors = [one for one in map(found_in(again), kept) if isinstance(one, Mirror)]
    assert all(one.canonical is run for one in mirrors), "what all share is there once"
    again.check_integrity()


def found_in(store: RoundStore) -> Callable[[str], History]:
    return lambda name: store.get(HISTORY, name)


def test_nobody_else_finds_it(tier: Tier) -> None:
    """No other model, nothing under another name or of another kind, and no other tokens."""
    store = store_on(tier, "nobody")
    store.keep(HISTORY, "ada", Run([1, 2, 3], kv(3, 4)))
    store.settle()
    assert store_on(tier, "else").find(HISTORY, "ada", [1, 2, 3])[1] == 0
    again = store_on(tier, "nobody")
    assert again.find(HISTORY, "bo", [1, 2, 3])[1] == 0
    assert again.find(CANONICAL, "ada", [1, 2, 3])[1] == 0
    assert again.find(HISTORY, "ada", [9, 2, 3])[1] == 0
    assert again.find(HISTORY, "ada", [1, 2, 9])[1] == 2


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[FolderTier]:
    tier = FolderTier(tmp_path / "tier", 2**30)
    yield tier
    tier.close()


def files(folder: FolderTier) -> list[Path]:
    return sorted(folder._folder.glob("*.data"), key=lambda path: path.stat().st_size)


def swap(found: list[Path]) -> None:
    """Two objects under each other's names."""
    one, *_, other = found
    aside = other.with_suffix(".aside")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


def cut(found: list[Path]) -> None:
    found[-1].write_bytes(found[-1].read_bytes()[:-100])


def change(found: list[Path]) -> None:
    data = bytearray(found[-1].read_bytes())
    data[len(data) // 2] ^= 1
    found[-1].write_bytes(data)


def lose(found: list[Path]) -> None:
    found[-1].unlink()


@pytest.mark.parametrize("spoil", [swap, cut, change, lose])
def test_what_was_spoilt_is_computed_and_kept_anew(
    folder: FolderTier, caplog: pytest.LogCaptureFixture, spoil: Callable[[list[Path]], None]
) -> None:
    run = Run([1, 2, 3], kv(3, 4))
    store = store_on(folder)
    store.keep(HISTORY, "ada", run)
    store.settle()
    spoil(files(folder))
    again = store_on(folder)
    with caplog.at_level(logging.WARNING):
        assert again.find(HISTORY, "ada", run.token_ids)[1] == 0
    assert spoil is lose or "ada was not read" in caplog.text or "Failed to read" in caplog.text
    again.check_integrity()
    for _ in range(2):  # one for the record, and one for what it refers to
        again.keep(HISTORY, "ada", Run([1, 2, 3], kv(3, 4)))
        again.settle()
        again.drop(HISTORY, "ada")
        again.find(HISTORY, "ada", run.token_ids)
    found, common = store_on(folder).find(HISTORY, "ada", run.token_ids)
    assert common == 3
    assert same(found, run)


def test_another_models_shape_is_refused(
    folder: FolderTier, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_on(folder)
    store.keep(HISTORY, "ada", Run([1, 2, 3], kv(3, 4)))
    store.settle()
    again = RoundStore(2**30)
    again.below = Below(folder, "model", SHAPE._replace(width=SHAPE.width // 2))
    assert again.find(HISTORY, "ada", [1, 2, 3])[1] == 0
    assert "expected 3 Shape" in caplog.text


def test_of_a_sequence_that_grows_only_what_is_new_is_written(folder: FolderTier) -> None:
    whole = sequence(90, 1)
    store = store_on(folder)
    sizes = []
    for tokens in (30, 60, 90):
        before = sum(path.stat().st_size for path in files(folder))
        store.keep(CANONICAL, "shared", whole.until(tokens))
        store.keep(HISTORY, f"{tokens}", mirror(run_of(store), ["own", "cached"] * 20, tokens))
        store.settle()
        sizes.append(sum(path.stat().st_size for path in files(folder)) - before)
    assert sizes[2] < 1.2 * sizes[0]
    again = store_on(folder)
    for name in ("30", "60", "90"):
        ids = store.get(HISTORY, name).token_ids
        found, common = again.find(HISTORY, name, ids)
        assert common == len(ids)
        assert same(found, store.get(HISTORY, name))
        assert isinstance(found, Mirror)
        assert found.canonical is run_of(again)
    assert same(run_of(again), whole)


def run_of(store: RoundStore) -> Run:
    found = store.get(CANONICAL, "shared")
    assert isinstance(found, Run)
    return found


def test_a_mirror_of_a_sequence_that_was_computed_anew_is_not_found(folder: FolderTier) -> None:
    """The same tokens, but other KV."""
    store = store_on(folder)
    store.keep(CANONICAL, "shared", sequence(50, 1))
    made = mirror(run_of(store), ["own", "cached"], 2)
    store.keep(HISTORY, "ada", made)
    store.settle()
    other = store_on(folder)
    other.keep(CANONICAL, "shared", sequence(50, 3, "there"))
    other.settle()
    for again in (other, store_on(folder)):
        assert again.find(HISTORY, "ada", made.token_ids)[1] == 0
        assert again.find(CANONICAL, "shared", made.canonical.token_ids)[1] == 50


@pytest.mark.parametrize("room", [1, 40, 90])
def test_what_there_is_no_room_for_is_found_below(tier: Tier, room: int) -> None:
    """A thousand steps of rounds of several sessions."""
    token = kv(1, 0).bytes
    store = store_on(tier, f"room {room}", room * token)
    some = random.Random(room)
    kept: dict[str, Mirror] = {}
    for number in range(1000):
        session, agent = some.randrange(3), some.randrange(4)
        name = f"{session}-{agent}"
        if name in kept and some.random() < 0.7:
            found, common = store.find(HISTORY, name, kept[name].token_ids)
            assert common == len(kept[name].token_ids)
            assert same(found, kept[name])
        else:
            ids = list(range(20))
            run, common = store.find_run(CANONICAL, f"{session}", ids)
            if common < len(ids):
                assert not any(other.startswith(f"{session}-") for other in kept)
                run = Run(ids, kv(20, number), f"{number}")
                store.keep(CANONICAL, f"{session}", run)
            made = mirror(run, some.choices(["own", "cached", "diff"], k=20), number)
            store.keep(HISTORY, name, made)
            kept[name] = made
        store.check_integrity()


def test_a_hundred_thousand_steps() -> None:
    """Of a store without anything below, which forgets."""
    token = kv(1, 0).bytes
    some = random.Random(7)
    store = RoundStore(200 * token)
    runs = [sequence(20, number, f"{number}") for number in range(5)]
    made = [
        (number % 5, mirror(runs[number % 5], some.choices(["own", "cached"], k=12), number))
        for number in range(40)
    ]
    for step in range(100_000):
        session, one = some.choice(made)
        choice = some.random()
        if choice < 0.4:
            name = f"{some.randrange(30)}"
            store.keep(CANONICAL, f"{session}", runs[session])
            store.keep(HISTORY, name, one)
            assert store.find(HISTORY, name, one.token_ids)[1] == len(one.token_ids)
        elif choice < 0.8:
            store.find(HISTORY, f"{some.randrange(30)}", one.token_ids)
        elif choice < 0.9:
            store.drop(HISTORY, f"{some.randrange(30)}")
        elif choice < 0.95:
            store.mirrors[f"{step}"] = one
        else:
            store.release(list(store.mirrors))
        if not step % 10:
            store.check_integrity()
    store.release(list(store.mirrors))
    for name in store.names(HISTORY):
        store.drop(HISTORY, name)
    for name in store.names(CANONICAL):
        store.drop(CANONICAL, name)
    assert store._bytes == 0
    assert not store._holders


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    """Each writes what it has, and what one has put there, the other finds."""
    tiers = [FolderTier(tmp_path / "tier", 2**30) for _ in range(2)]
    stores = [store_on(tier) for tier in tiers]
    for number in range(20):
        stores[number % 2].keep(HISTORY, f"{number}", Run([number, 2, 3], kv(3, number % 5)))
    for store in stores:
        store.settle()
    for number in range(20):
        for store in stores:
            assert store.find(HISTORY, f"{number}", [number, 2, 3])[1] == 3
    assert len(files(tiers[0])) == 20 + 5, "the same KV is there once"
    for tier in tiers:
        tier.close()


def test_a_folder_that_vanishes_costs_what_it_had(folder: FolderTier) -> None:
    store = store_on(folder)
    store.keep(HISTORY, "ada", Run([1, 2, 3], kv(3, 4)))
    store.settle()
    shutil.rmtree(folder._folder)
    store.drop(HISTORY, "ada")
    assert store.find(HISTORY, "ada", [1, 2, 3])[1] == 0
    store.keep(HISTORY, "ada", Run([1, 2, 3], kv(3, 4)))
    store.settle()
    assert store.find(HISTORY, "ada", [1, 2, 3])[1] == 3


def test_what_is_waiting_is_written_before_the_end(folder: FolderTier) -> None:
    store = store_on(folder)
    for number in range(30):
        store.keep(HISTORY, f"{number}", Run([number, 2, 3], kv(3, number)))
    assert store.below is not None
    store.below.close()
    store.keep(HISTORY, "late", Run([1, 2, 3], kv(3, 4)))
    store.settle()  # nobody writes it any more, and nobody waits for it
    again = store_on(FolderTier(folder._folder, 2**30))
    assert all(again.find(HISTORY, f"{number}", [number, 2, 3])[1] == 3 for number in range(30))
