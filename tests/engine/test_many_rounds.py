"""A thousand rounds of random shapes on one engine: every token is accounted for, nothing stays."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from td_serve.engine.restoring import ready_parameters
from td_serve.models.random_model import write_random
from td_serve.reuse import plan_reuse
from td_serve.segments import alike
from td_serve.types import (
    AgentId,
    GenerateRequest,
    PassSpec,
    RequestId,
    Rule,
    RuleName,
    SessionId,
    pack,
)
from tests.engine.test_passes import Engine, tokens

pytestmark = pytest.mark.engine

EXAMPLES, STEPS = 10, 100
AGENTS = [AgentId(name) for name in ("ada", "bo", "cyd", "dan")]
HEAD = tokens(12, 3)
RULES = [
    Rule(name=RuleName.NONE),
    Rule(name=RuleName.FULL),
    Rule(name=RuleName.FIRST_K, k=3),
    Rule(name=RuleName.FIRST_PAGES, k=1),
    Rule(name=RuleName.HKVD, ratio=0.3, depth=0.5),
    Rule(name=RuleName.HKVD, ratio=0.3, depth=0.5, own=True, weighed=True),
    Rule(name=RuleName.FIRST_K_HKVD, k=2, ratio=1.0, left=0.05, depth=0.5),
]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    write_random(path, like="llama", layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32)
    # So little room that canonical sequences and histories come and go.
    engine = Engine(path, store_bytes=1200 * 1024)
    yield engine
    engine.close()


class Kept(NamedTuple):
    """Tokens of which KV is kept, as a rule has made it behind the first `exact` of them."""

    token_ids: list[int]
    by: Rule
    exact: int


NOTHING_KEPT = Kept([], RULES[0], 0)


class Rounds(RuleBasedStateMachine):
    """Eight sessions, whose agents' histories grow; rounds end, or are given up half-way."""

    engine: ClassVar[Engine]
    finished: ClassVar[int] = 0
    dropped: ClassVar[int] = 0
    went_on: ClassVar[int] = 0
    """Passes that went to their end; histories that had been kept, and had to go; members who went
    on behind what they had shared before."""

    def __init__(self) -> None:
        super().__init__()
        self._histories: dict[tuple[str, AgentId], list[int]] = {}
        self._kept: dict[str, Kept | None] = {}
        """By the history's name, what is kept of it unless it had to go; None if that is open."""
        self._example = next(_numbers)

    @rule(
        sim=st.sampled_from(["village", "town", "ship", "inn", "mill", "court", "camp", "farm"]),
        said=st.lists(st.integers(0, 12), min_size=1, max_size=5),
        hears=st.lists(st.integers(0, 2**5 - 1), min_size=len(AGENTS), max_size=len(AGENTS)),
        grows=st.lists(st.integers(0, 90), min_size=len(AGENTS), max_size=len(AGENTS)),
        how=st.sampled_from(RULES),
        reverse=st.booleans(),
        slices=st.none() | st.integers(0, 3),
        remember=st.booleans(),
    )
    def play(
        self,
        sim: str,
        said: list[int],
        hears: list[int],
        grows: list[int],
        how: Rule,
        reverse: bool,
        slices: int | None,
        remember: bool,
    ) -> None:
        """A round: each agent hears some of what was said (some of it again), the last one maybe in
        another order, and may remember it.

        With `slices` it is given up after so many of every pass.
        """
        requests = {}
        for agent, mask, more in zip(AGENTS, hears, grows, strict=True):
            heard = [tokens(5 + 3 * one, one) for at, one in enumerate(said) if mask >> at & 1]
            if reverse and agent == AGENTS[-1]:
                heard.reverse()
            history = self._histories.setdefault((sim, agent), tokens(9, len(agent)))
            history += tokens(more, 1000 + next(_numbers))
            del history[: -300 if len(history) > 300 else 0]
            requests[agent] = _request(history, heard)
            if remember:
                history += [token for text in heard for token in text]
        reuse = plan_reuse(SessionId(f"{sim}-{self._example}"), requests, how, HEAD)
        assert len(reuse.reasons) + sum(len(spec.members) for spec in reuse.passes) == len(requests)
        for spec in reuse.passes:
            if slices is not None:
                self._give_up(spec, slices)
            else:
                self._finish(spec, {one.request_id: one for one in requests.values()})

    def _give_up(self, spec: PassSpec, slices: int) -> None:
        self.engine.call("td_begin", pack(spec))
        done = any(self.engine.call("td_step", 0.0) is not None for _ in range(slices))
        self.engine.call("td_abort")
        if done:
            self.engine.call("td_release", [member.request_id for member in spec.members])
            self._kept |= {member.history: None for member in spec.members}

    def _finish(self, spec: PassSpec, requests: dict[RequestId, GenerateRequest]) -> None:
        found = self.engine.run(spec, budget_s=60.0).members
        assert set(found) == {member.request_id for member in spec.members}
        assert self.engine.mirrors() == len(spec.members)
        ready = {}
        for member in spec.members:
            counted = found[member.request_id]
            shared = sum(
                max(0, piece.tokens - max(0, counted.local - piece.start))
                for piece in member.pieces
            )
            assert counted.prompt == len(member.token_ids)
            assert counted.prompt == counted.local + counted.reused + counted.selected + counted.new
            assert counted.reused + counted.selected == shared
            private = member.pieces[0].start
            kept = self._kept.get(member.history, NOTHING_KEPT)
            if kept is None:
                # What has been given up may have left this or that.
                fresh = Kept(member.token_ids, spec.rule, private)
                self._kept[member.history] = None if counted.local else fresh
            else:
                known = alike(kept.token_ids, member.token_ids)
                if kept.by != spec.rule:
                    known = min(known, kept.exact)
                # Of what another canonical sequence had in other places, the prompt's own is left.
                assert counted.local in (0, known, min(known, kept.exact))
                Rounds.dropped += counted.local < min(known, kept.exact)
                Rounds.went_on += counted.local > kept.exact
                if counted.local > kept.exact:
                    exact = min(private, kept.exact)
                else:
                    exact = max(private, counted.local)
                self._kept[member.history] = Kept(member.token_ids, spec.rule, exact)
            if spec.rule.name is RuleName.NONE:
                assert counted.selected == 0
            if spec.rule.name is RuleName.FULL:
                assert counted.reused == 0
            ready[member.request_id] = ready_parameters(member.request_id, member.token_ids)
        prompts = [requests[member.request_id].prompt_token_ids for member in spec.members]
        answers = self.engine.generate(prompts, list(ready.values()))
        assert [len(one) for one in answers] == [2] * len(prompts)
        if spec.rule.name is RuleName.FULL:
            assert answers == self.engine.generate(prompts, [None] * len(prompts))
        self.engine.call("td_release", list(ready))
        Rounds.finished += 1

    @invariant()
    def nothing_is_kept_for_anybody(self) -> None:
        assert self.engine.mirrors() == 0


def _request(history: list[int], heard: list[list[int]]) -> GenerateRequest:
    number = next(_numbers)
    parts = [list(history), *heard, tokens(random.Random(number).randint(1, 9), number)]
    edges = list(itertools.accumulate(map(len, parts)))
    return GenerateRequest(
        request_id=RequestId(f"member-{number}"),
        prompt_token_ids=[token for part in parts for token in part],
        sampling=b"",
        cuts=sorted({edge for edge in edges[:-1] if edge > 0}),
    )


def test_a_thousand_rounds(engine: Engine) -> None:
    Rounds.engine = engine
    run_state_machine_as_test(
        Rounds,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Rounds.finished > EXAMPLES * STEPS * 0.4
    assert Rounds.dropped > 10, "or there was room for all"
    assert Rounds.went_on > 10, "or nobody's prompt has gone on"
