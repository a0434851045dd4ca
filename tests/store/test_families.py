"""Families: what a mirror is put together from and takes, and what a store may hold of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_serve.store.codecs import LOSSLESS, Codec, Codecs
from td_serve.store.families import NOTHING, CodedRun, Mirror, Rows, Run, continued
from td_serve.store.kv import KV
from td_serve.store.rounds import CANONICAL, HISTORY, RoundStore
from td_serve.store.sizes import family_size
from td_serve.types import Rule, RuleName

WIDTH = 64
RULE = Rule(name=RuleName.HKVD)


class Turned:
    """A rotation that adds a token's position: what is turned wrongly shows."""

    def rotate(
        self, layer: int, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return query + positions[:, None], key


def kv(tokens: int, seed: int) -> KV:
    made = torch.Generator().manual_seed(seed)
    return KV(
        [torch.randn(tokens, WIDTH, generator=made)], [torch.randn(tokens, WIDTH, generator=made)]
    )


def mirror(canonical: Run, kinds: list[str], seed: int) -> Mirror:
    """Of the canonical sequence, one after the other, tokens that are `cached` or computed anew
    (`diff`), and between them its `own`."""
    shared = [at for at, kind in enumerate(kinds) if kind != "own"]
    source = {at: number for number, at in enumerate(shared)}
    whole = kv(len(kinds), seed)

    def places(wanted: str) -> torch.Tensor:
        return indices([at for at, kind in enumerate(kinds) if kind == wanted])

    def sources(wanted: str) -> torch.Tensor:
        return indices([source[at] for at in places(wanted).tolist()])

    own, diffs = places("own"), places("diff")
    return Mirror(
        token_ids=[
            canonical.token_ids[source[at]] if at in source else 10_000 + at
            for at in range(len(kinds))
        ],
        rule=RULE,
        exact=shared[0] if shared else len(kinds),
        canonical=canonical,
        cached=places("cached"),
        sources=sources("cached"),
        history=NOTHING,
        history_tokens=0,
        own=(Rows(own, whole.rows(own)), Rows(diffs, whole.rows(diffs), sources("diff"))),
    )


def indices(found: list[int]) -> torch.Tensor:
    return torch.tensor(found, dtype=torch.int64)


def dense(one: Mirror, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, put together in a place where what is not written is NaN."""
    keys, values = torch.full((2, last - first, WIDTH), torch.nan)
    written = torch.zeros(last - first)
    for positions, some_keys, some_values in one.parts(Turned(), 0, first, last):
        keys[positions - first], values[positions - first] = some_keys, some_values
        written[positions - first] += 1
    assert (written == 1).all(), "each token once"
    return keys, values


kinds = st.lists(st.sampled_from(["cached", "diff", "own"]), min_size=1, max_size=40)
codecs = st.builds(
    Codecs,
    diffs=st.sampled_from(list(Codec)),
    private=st.sampled_from([Codec.LOSSLESS, Codec.INT8]),
)


@given(kinds, codecs)
def test_a_mirror_is_what_it_was_made_from(found: list[str], how: Codecs) -> None:
    """What is kept as it is comes back bit for bit; what is coded comes back nearly so."""
    canonical = Run(list(range(50)), kv(50, 1))
    made = mirror(canonical, found, 2)
    before = dense(made, 0, len(found))
    coded = made.coded(Turned(), how)
    assert made.coded(Turned(), LOSSLESS).exact == made.exact
    after = dense(coded, 0, len(found))
    exactly = {
        "cached": True,
        "diff": how.diffs is Codec.LOSSLESS,
        "own": how.private is Codec.LOSSLESS,
    }
    for at, kind in enumerate(found):
        for one, other in zip(before, after, strict=True):
            if exactly[kind]:
                assert torch.equal(one[at], other[at])
            else:
                torch.testing.assert_close(one[at], other[at], atol=8.0, rtol=0.0)
    if not exactly["own"]:
        assert coded.exact == 0, "nothing of it is what the prompt alone gives"
    again = coded.coded(Turned(), how)
    assert all(
        torch.equal(one, two) for one, two in zip(after, dense(again, 0, len(found)), strict=True)
    )


@given(kinds, st.data())
def test_any_part_of_it_can_be_had(found: list[str], data: st.DataObject) -> None:
    made = mirror(Run(list(range(50)), kv(50, 1)), found, 2)
    first = data.draw(st.integers(0, len(found)))
    last = data.draw(st.integers(first, len(found)))
    for whole, part in zip(dense(made, 0, len(found)), dense(made, first, last), strict=True):
        assert torch.equal(whole[first:last], part)


@given(kinds, codecs)
def test_what_follows_is_the_prompts_own(found: list[str], how: Codecs) -> None:
    made = mirror(Run(list(range(50)), kv(50, 1)), found, 2).coded(Turned(), how)
    tail = kv(3, 9)
    longer = made.followed_by([*made.token_ids, 7, 8, 9], tail)
    keys, values = dense(longer, 0, len(found) + 3)
    assert torch.equal(keys[len(found) :], tail.keys[0])
    assert torch.equal(values[: len(found)], dense(made, 0, len(found))[1])
    # And who goes on from fewer of its tokens has only those.
    for tokens in range(len(found) + 1):
        nothing = mirror(longer.canonical, [], 0)
        shorter = continued(longer, tokens, nothing)
        assert all(
            torch.equal(one, other[:tokens])
            for one, other in zip(dense(shorter, 0, tokens), (keys, values), strict=True)
        )


def test_sizes_add_up() -> None:
    token = 2 * WIDTH * 4
    canonical = Run(list(range(64)), kv(64, 1))
    first = mirror(canonical, ["own"] * 4 + ["cached"] * 64, 2)
    second = mirror(canonical, ["own"] * 9 + ["diff"] + ["cached"] * 63, 3)
    found = family_size([first, second], token)
    assert found.master == 64 * token
    one, two = found.mirrors
    assert (one.tokens, one.shared, one.dense) == (68, 64, 68 * token)
    assert (one.private, one.diffs) == (4 * token, 0)
    assert (two.private, two.diffs) == (9 * token, token)
    assert (one.blocks, one.blocks_changed) == (3, 0)
    assert (two.blocks, two.blocks_changed) == (3, 1)
    assert one.block_sparse == one.dense, "the master of the paper's layout"
    # Tokens 0 to 31 differ: its own, and the one that was computed anew.
    assert two.block_sparse == 32 * token + 8
    assert family_size([], token).mirrors == []


def test_what_is_still_to_be_loaded_is_counted_where_nothing_else_holds_it() -> None:
    """A session's texts go when others' come; who has not loaded them yet holds them still."""
    token = kv(1, 0).bytes
    store = RoundStore(100 * token)
    for number in range(3):
        canonical = Run(list(range(90)), kv(90, number))
        store.keep(CANONICAL, str(number), canonical)
        made = mirror(canonical, ["own"] * 5 + ["cached"] * 90, 7 + number)
        store.mirrors[str(number)] = made
        store.keep(HISTORY, str(number), made)
        store.check_integrity()
    assert store.bytes_to_load == 2 * 95 * token
    store.release(["0", "1", "2"])
    assert store.bytes_to_load == 0


@pytest.mark.parametrize("private", [Codec.LOSSLESS, Codec.INT8])
def test_a_prompt_is_kept_and_goes_on(private: Codec) -> None:
    store = RoundStore(10**6, Codecs(private=private))
    whole, tail = kv(40, 1), kv(2, 2)
    ids = list(range(40))
    assert store.misses("ada", ids, is_behind=False) == 0
    store.keep_longer("ada", ids, whole)
    kept, common = store.find(HISTORY, "ada", ids)
    assert common == 40
    assert isinstance(kept, Run if private is Codec.LOSSLESS else CodedRun)
    assert store.misses("ada", ids, is_behind=False) == -1
    assert store.misses("ada", [*ids, 1], is_behind=True) == -1, "that was no mirror"
    made = mirror(Run(list(range(50)), kv(50, 1)), ["own", "cached"], 2)
    store.keep(HISTORY, "bo", made)
    longer = [*made.token_ids, 5, 6]
    assert store.misses("bo", longer, is_behind=True) == 2
    assert store.misses("bo", [99, *longer], is_behind=True) == -1, "it begins otherwise"
    store.keep_longer("bo", longer, tail)
    assert store.misses("bo", longer, is_behind=True) == -1
    store.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=40))
def test_a_canonical_sequence_goes_after_those_who_refer_to_it(
    turns: list[tuple[int, int]],
) -> None:
    """Sessions' agents in any order, with room for about two sessions."""
    token = kv(1, 0).bytes
    store = RoundStore(60 * token)
    for number, (session, agent) in enumerate(turns):
        ids = list(range(20))
        run, common = store.find_run(CANONICAL, f"{session}", ids)
        if common < len(ids):
            run = Run(ids, kv(20, number))
            store.keep(CANONICAL, f"{session}", run)
        made = mirror(run, ["own"] * 3 + ["cached"] * 17, number)
        store.keep(HISTORY, f"{session}-{agent}", made)
        store.check_integrity()
        for name in store.names(HISTORY):
            kept = store.get(HISTORY, name)
            assert isinstance(kept, Mirror)
            canonical = store.get(CANONICAL, name.partition("-")[0])
            assert kept.canonical is canonical, "and there is one of it"


def test_what_is_larger_than_all_there_is_room_for_stays_until_another_comes() -> None:
    token = kv(1, 0).bytes
    store = RoundStore(10 * token)
    for number in range(2):
        run = Run(list(range(20)), kv(20, number))
        store.keep(CANONICAL, f"{number}", run)
        store.keep(HISTORY, f"{number}", mirror(run, ["own", "cached"], number))
        store.check_integrity()
        assert store.names(CANONICAL) == store.names(HISTORY) == [f"{number}"]
