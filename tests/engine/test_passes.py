"""Passes in a real engine's worker, and requests that load what they made: exact where promised."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm import EngineArgs, SamplingParams
from vllm.config import KVTransferConfig
from vllm.v1.engine.llm_engine import LLMEngine

from td_serve.engine.gauges import Gauges
from td_serve.engine.restoring import (
    STORE_BYTES,
    Output,
    keep_parameters,
    output_parameters,
    ready_parameters,
)
from td_serve.models.random_model import write_random
from td_serve.segments import key
from td_serve.types import (
    Canonical,
    MemberPass,
    PassResult,
    PassSpec,
    PassTokens,
    Piece,
    RequestId,
    Rule,
    RuleName,
    Span,
    Written,
    pack,
    unpack,
)

pytestmark = pytest.mark.engine

HEADER = 24
LAYERS = 4
FULL = Rule(name=RuleName.FULL)
NONE = Rule(name=RuleName.NONE)
_numbers = itertools.count()


class Engine:
    """An engine with passes, in a process of its own: there is one KV connector in each."""

    def __init__(self, model: Path, store_bytes: int = 2**28, **more: Any) -> None:
        arguments = EngineArgs(
            model=str(model),
            dtype="float32",
            block_size=32,
            enforce_eager=True,
            kv_cache_memory_bytes=2**27,
            worker_extension_cls="td_serve.engine.worker.PassWorker",
            kv_transfer_config=KVTransferConfig(
                kv_load_failure_policy="recompute",
                kv_connector="RoundConnector",
                kv_connector_module_path="td_serve.engine.restoring",
                kv_role="kv_both",
                kv_connector_extra_config={STORE_BYTES: store_bytes},
            ),
            **{"max_model_len": 1024, **more},
        )
        self._gauges = Gauges()
        self.llm = LLMEngine.from_engine_args(
            arguments, enable_multiprocessing=True, stat_loggers=[lambda *_: self._gauges]
        )

    @property
    def preemptions(self) -> int:
        return self._gauges.preemptions

    def close(self) -> None:
        self.llm.engine_core.shutdown()

    def call(self, method: str, *args: Any) -> Any:
        answer, *others = self.llm.collective_rpc(method, args=args)
        assert all(other == answer for other in others), "ranks that do not agree"
        return answer

    def run(self, spec: PassSpec, budget_s: float = 0.0) -> PassResult:
        self.call("td_begin", pack(spec))
        while (packed := self.call("td_step", budget_s)) is None:
            pass
        return unpack(packed, PassResult)

    def answers(
        self, members: list[Member], *, load: bool, salted: bool = True, max_tokens: int = 32
    ) -> list[list[int]]:
        ready = [
            ready_parameters(one.spec.request_id, one.spec.token_ids) if load else None
            for one in members
        ]
        salts = [f"{one.spec.request_id}-{load}" if salted else None for one in members]
        return self.generate([one.prompt for one in members], ready, salts, max_tokens)

    def generate(
        self,
        prompts: list[list[int]],
        ready: Sequence[dict[str, Any] | None],
        salts: Sequence[str | None] | None = None,
        max_tokens: int = 2,
    ) -> list[list[int]]:
        """Greedy answers, of prompts whose KV is loaded as `ready` says; salts are new ones."""
        names = [f"request-{next(_numbers)}" for _ in prompts]
        for name, tokens, one, salt in zip(names, prompts, ready, salts or names, strict=True):
            prompt: dict[str, Any] = {"prompt_token_ids": tokens}
            if salt is not None:
                prompt["cache_salt"] = salt
            extra = None if one is None else {"kv_transfer_params": one}
            sampling = SamplingParams(
                temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra
            )
            self.llm.add_request(name, prompt, sampling)
        found: dict[str, list[int]] = {}
        while self.llm.has_unfinished_requests():
            for output in self.llm.step():
                if output.finished:
                    found[output.request_id] = list(output.outputs[0].token_ids)
        return [found[name] for name in names]

    def mirrors(self) -> int:
        """How many members' KV is kept."""
        return int(self.call("td_mirrors"))

    def release(self, members: list[Member]) -> None:
        self.call("td_release", [member.spec.request_id for member in members])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_random(path, like="llama", layers=LAYERS, kv_heads=2, head_dim=64)
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    engine = Engine(model)
    assert engine.call("td_why_no_passes") is None
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def nothing_stays(engine: Engine) -> Iterator[None]:
    yield
    assert engine.mirrors() == 0


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40_000), k=count)


class Round:
    """A round's canonical sequence: a header and some segments."""

    def __init__(self, *lengths: int, seed: int = 1) -> None:
        ids = tokens(HEADER, 7)
        spans = []
        for number, count in enumerate(lengths):
            spans.append(Span(start=len(ids), tokens=count))
            ids = ids + tokens(count, seed * 100 + number)
        self.canonical = Canonical(key=key(("test",), ids), token_ids=ids, segments=spans)


class Member:
    """An agent in a round: its history, the segments, and a task that the engine computes."""

    def __init__(self, round_: Round, history: list[int], name: str, task: int = 12) -> None:
        prompt, pieces = list(history), []
        for span in round_.canonical.segments:
            pieces.append(Piece(start=len(prompt), tokens=span.tokens, source=span.start))
            prompt += round_.canonical.token_ids[span.start : span.start + span.tokens]
        self.spec = MemberPass(
            request_id=RequestId(f"member-{next(_numbers)}"),
            history=name,
            token_ids=prompt,
            pieces=pieces,
            asked=tokens(task, next(_numbers)),
        )
        self.prompt = prompt + self.spec.asked


def members_of(round_: Round, *histories: int) -> list[Member]:
    return [
        Member(round_, tokens(count, 50 + seed), f"agent-{next(_numbers)}")
        for seed, count in enumerate(histories)
    ]


def spec_of(round_: Round, members: list[Member], rule: Rule) -> PassSpec:
    return PassSpec(canonical=round_.canonical, rule=rule, members=[m.spec for m in members])


def test_with_everything_computed_answers_are_the_engines_own(engine: Engine) -> None:
    round_ = Round(70, 33, 5)
    members = members_of(round_, 40, 0, 131, 64)
    found = engine.run(spec_of(round_, members, FULL))
    for member in members:
        private = member.spec.pieces[0].start
        assert found.members[member.spec.request_id] == PassTokens(
            prompt=private + 108, local=0, reused=0, selected=108, new=private
        )
    assert engine.answers(members, load=True) == engine.answers(members, load=False)
    engine.release(members)


def test_a_next_round_takes_history_and_earlier_segments_from_what_is_kept(engine: Engine) -> None:
    first = Round(70)
    before = members_of(first, 40, 90)
    engine.run(spec_of(first, before, NONE))
    engine.release(before)
    second = Round(70, 50)
    histories = [member.spec.token_ids[: member.spec.pieces[0].start] for member in before]
    members = [
        Member(second, [*history, *tokens(21, seed)], earlier.spec.history)
        for seed, (history, earlier) in enumerate(zip(histories, before, strict=True))
    ]
    found = engine.run(spec_of(second, members, FULL))
    for member, history in zip(members, histories, strict=True):
        counted = found.members[member.spec.request_id]
        assert (counted.local, counted.new) == (len(history), 21)
    assert engine.answers(members, load=True) == engine.answers(members, load=False)
    engine.release(members)


def test_what_the_engine_computed_itself_is_a_history_for_the_next_pass(engine: Engine) -> None:
    """A cold round's prompts, one by one; the next ones begin like them and go on otherwise."""
    round_ = Round(70, 33, seed=6)
    members = members_of(round_, 131, 40, 64)
    begun = [member.spec.token_ids[: member.spec.pieces[0].start] for member in members]
    kept = (131, 40, 50)  # the last one's is not kept whole
    engine.generate(
        [[*begin, *tokens(20, seed)] for seed, begin in enumerate(begun)],
        [
            keep_parameters(member.spec.history, None if count == 131 else count)
            for member, count in zip(members, kept, strict=True)
        ],
    )
    found = engine.run(spec_of(round_, members, FULL))
    assert [one.local for one in found.members.values()] == list(kept)
    assert engine.answers(members, load=True) == engine.answers(members, load=False)
    engine.release(members)


def test_a_history_is_read_before_its_blocks_are_written_to_again(cramped: Engine) -> None:
    """The pool has room for one of the prompts: the second takes over the first one's blocks, in
    the step after that has finished."""
    round_ = Round(70, seed=8)
    (member,) = members_of(round_, 400)
    begin = member.spec.token_ids[:400]
    cramped.generate(
        [begin, tokens(400, 81)], [keep_parameters(member.spec.history), None], max_tokens=1
    )
    found = cramped.run(spec_of(round_, [member], FULL))
    assert [one.local for one in found.members.values()] == [400]
    assert cramped.answers([member], load=True) == cramped.answers([member], load=False)
    cramped.release([member])


def canonical_of(round_: Round, *texts: list[int]) -> Canonical:
    """The header of a round, and these texts after it."""
    ids = round_.canonical.token_ids[:HEADER]
    spans = []
    for text in texts:
        spans.append(Span(start=len(ids), tokens=len(text)))
        ids = ids + text
    return Canonical(key=round_.canonical.key, token_ids=ids, segments=spans)


def test_a_wrong_guess_takes_nothing_away_and_a_right_one_is_found(engine: Engine) -> None:
    round_ = Round(seed=9)
    first, second, third, wrong = (tokens(count, 900 + count) for count in (70, 50, 33, 41))

    def computed(*texts: list[int], is_guess: bool = False) -> int:
        sequence = canonical_of(round_, *texts)
        history = tokens(5, 99)
        member = MemberPass(
            request_id=RequestId(f"member-{next(_numbers)}"),
            history=f"agent-{next(_numbers)}",
            token_ids=[*history, *texts[0]],
            pieces=[Piece(start=5, tokens=len(texts[0]), source=HEADER)],
        )
        members = [] if is_guess else [member]
        found = engine.run(PassSpec(canonical=sequence, rule=NONE, members=members))
        engine.call("td_release", [member.request_id])
        return found.canonical

    assert computed(first, second) == HEADER + 120
    assert computed(first, wrong, is_guess=True) == 41
    assert computed(first, second, third) == 33, "what the guess went on otherwise than is there"
    assert computed(first, wrong, is_guess=True) == 41, "and the guess has gone with the round"
    assert computed(first, wrong, third) == 33
    assert computed(first, wrong, third, second, is_guess=True) == 50
    assert computed(first, wrong, third, second) == 0
    stranger = msgspec.structs.replace(
        canonical_of(round_, first), token_ids=tokens(40, 5), segments=[]
    )
    assert engine.run(PassSpec(canonical=stranger, rule=NONE, members=[])).canonical == 40
    assert computed(first, wrong, third, second) == 0, "nor does one with nothing in common"


def test_what_turns_have_put_out_is_taken_as_it_was_decoded(engine: Engine) -> None:
    """A turn whose prompt is the header has decoded what the canonical sequence would have there:
    taking it over changes nothing. Of another turn it does."""
    round_ = Round(70, 33, 5, seed=12)
    span = round_.canonical.segments[0]
    put_out = round_.canonical.token_ids[span.start : span.start + span.tokens]

    def written(name: str, prompt: list[int]) -> Written:
        output = Output(name, len(prompt), len(put_out), len(prompt))
        engine.generate([[*prompt, *put_out, 9]], [output_parameters(output)])
        piece = Piece(start=len(prompt), tokens=len(put_out), source=span.start)
        return Written(name=name, piece=piece)

    histories = [tokens(40, 50), tokens(131, 51)]

    def play(*found: Written) -> tuple[int, list[list[int]]]:
        canonical = msgspec.structs.replace(
            round_.canonical, key=key((), [next(_numbers)])
        )  # nothing is kept of it
        members = [Member(round_, history, f"agent-{next(_numbers)}") for history in histories]
        for member in members:  # the same task every time
            member.prompt = [*member.spec.token_ids, 5, 6, 7]
        spec = PassSpec(
            canonical=canonical, rule=NONE, members=[m.spec for m in members], written=list(found)
        )
        computed = engine.run(spec).canonical
        answers = engine.answers(members, load=True)
        engine.release(members)
        return computed, answers

    header = round_.canonical.token_ids[:HEADER]
    total = len(round_.canonical.token_ids)
    as_computed = play()
    assert as_computed[0] == total
    assert play(written("alike", header)) == (total - span.tokens, as_computed[1])
    assert engine.call("td_written") == [], "it has been taken over"
    computed, answers = play(written("other", tokens(77, 3)))
    assert computed == total - span.tokens
    assert answers != as_computed[1]
    missing = Written(name="missing", piece=written("dropped", header).piece)
    assert play(missing) == as_computed, "what has not come is computed"
    assert engine.call("td_written") == ["dropped"]
    engine.call("td_drop_written", ["dropped"])
    assert engine.call("td_written") == []


def test_of_a_request_that_is_aborted_or_keeps_nothing_there_is_no_history(engine: Engine) -> None:
    round_ = Round(70, seed=7)
    (member,) = members_of(round_, 300)
    begin = member.spec.token_ids[:300]
    engine.generate([begin], [keep_parameters(member.spec.history, 0)])
    extra = {"kv_transfer_params": keep_parameters(member.spec.history)}
    sampling = SamplingParams(max_tokens=500, ignore_eos=True, extra_args=extra)
    engine.llm.add_request("left", {"prompt_token_ids": begin, "cache_salt": "left"}, sampling)
    engine.llm.step()
    engine.llm.abort_request(["left"])
    engine.generate([begin], [None])
    found = engine.run(spec_of(round_, [member], FULL))
    assert [one.local for one in found.members.values()] == [0]
    engine.release([member])


def test_reuse_leaves_exact_requests_exact(engine: Engine) -> None:
    """The same prompts without a salt, before and after: reused KV never meets them."""
    round_ = Round(90, 90, seed=2)
    members = members_of(round_, 33, 64)
    exact = engine.answers(members, load=False)
    engine.run(spec_of(round_, members, NONE))
    reused = engine.answers(members, load=True)
    assert reused != exact, "or this would prove nothing"
    assert engine.answers(members, load=False, salted=False) == exact
    engine.release(members)


def test_together_and_one_by_one_members_get_the_same(engine: Engine) -> None:
    round_ = Round(90, 90, seed=3)
    rule = Rule(name=RuleName.FIRST_K, k=8)
    together = members_of(round_, 33, 64, 0)
    engine.run(spec_of(round_, together, rule))
    alone = members_of(round_, 33, 64, 0)
    for one, other in zip(together, alone, strict=True):
        other.prompt = one.prompt
        engine.run(spec_of(round_, [other], rule))
    assert engine.answers(together, load=True) == engine.answers(alone, load=True)
    engine.release(together + alone)


def test_a_prompt_that_is_not_what_was_made_ready_is_computed(engine: Engine) -> None:
    round_ = Round(70, seed=4)
    (member,) = members_of(round_, 40)
    engine.run(spec_of(round_, [member], NONE))
    member.prompt[3] += 1
    assert engine.answers([member], load=True) == engine.answers([member], load=False)
    engine.release([member])


def test_a_pass_that_is_given_up_leaves_nothing(engine: Engine) -> None:
    round_ = Round(70, seed=5)
    members = members_of(round_, 40)
    engine.call("td_begin", pack(spec_of(round_, members, FULL)))
    assert engine.call("td_step", 0.0) is None
    engine.call("td_abort")
    assert engine.mirrors() == 0
    engine.run(spec_of(round_, members, FULL))
    assert engine.answers(members, load=True) == engine.answers(members, load=False)
    engine.release(members)


def test_what_is_not_kept_any_more_is_computed(engine: Engine) -> None:
    round_ = Round(70, 40, seed=6)
    members = members_of(round_, 40, 9)
    engine.run(spec_of(round_, members, NONE))
    engine.release(members)
    assert engine.answers(members, load=True) == engine.answers(members, load=False)


def under(round_: Round, name: str) -> Round:
    """The same canonical sequence under another name."""
    round_.canonical = msgspec.structs.replace(round_.canonical, key=key((name,), []))
    return round_


def again(members: list[Member], name: str) -> list[Member]:
    """The same prompts, once more: other requests, other histories."""
    made = copy.deepcopy(members)
    for member in made:
        member.spec = msgspec.structs.replace(
            member.spec,
            request_id=RequestId(f"member-{next(_numbers)}"),
            history=f"{member.spec.history}-{name}",
        )
    return made


def test_a_canonical_sequence_that_has_grown_is_as_good_as_one_made_at_once(
    engine: Engine,
) -> None:
    """Only what is new of it is computed, and after what was kept."""
    short, long = under(Round(70, seed=8), "grows"), under(Round(70, 50, seed=8), "grows")
    first = members_of(short, 20, 30)
    assert engine.run(spec_of(short, first, NONE)).canonical == HEADER + 70
    members = members_of(long, 33, 64)
    assert engine.run(spec_of(long, members, NONE)).canonical == 50
    fresh = under(Round(70, 50, seed=8), "at once")
    others = again(members, "at once")
    assert engine.run(spec_of(fresh, others, NONE)).canonical == HEADER + 120
    grown = engine.answers(members, load=True)
    assert grown == engine.answers(others, load=True)
    assert grown != engine.answers(members, load=False), "or nothing was reused"
    engine.release([*first, *members, *others])


def test_a_group_of_more_rows_than_a_step_has_is_computed_all_the_same(engine: Engine) -> None:
    """The engine takes 2,048 tokens a step; these are more, and more than one has."""
    round_ = Round(70, seed=9)
    members = members_of(round_, *[600] * 5)
    found = engine.run(spec_of(round_, members, FULL))
    assert sum(one.new + one.selected for one in found.members.values()) > 2048
    assert engine.answers(members, load=True) == engine.answers(members, load=False)
    engine.release(members)


@pytest.fixture
def poor(model: Path) -> Iterator[Engine]:
    """An engine that keeps 128 rows of 4 KiB."""
    engine = Engine(model, store_bytes=2**19)
    yield engine
    engine.close()


def test_a_pass_that_would_keep_more_than_it_may_is_refused(poor: Engine) -> None:
    round_ = Round(70, seed=10)
    with pytest.raises(Exception, match=r"for 170 rows, and 0 for .*at most 524288"):
        poor.run(spec_of(round_, members_of(round_, 100), FULL))
    assert poor.mirrors() == 0
    small = members_of(round_, 10)
    poor.run(spec_of(round_, small, FULL))
    assert poor.answers(small, load=True) == poor.answers(small, load=False)
    others = members_of(round_, 9)
    poor.run(spec_of(round_, others, FULL))  # what is kept of the first ones makes room
    more = members_of(round_, 50)
    with pytest.raises(Exception, match="for 50 rows, and 327680 for what is still to be loaded"):
        poor.run(spec_of(round_, more, FULL))
    assert poor.answers(small, load=True) == poor.answers(small, load=False)
    poor.release(small)
    poor.run(spec_of(round_, more, FULL))
    poor.release([*others, *more])
    assert poor.mirrors() == 0


@pytest.mark.parametrize("longer", ["canonical", "member"])
def test_what_is_longer_than_the_window_is_refused(engine: Engine, longer: str) -> None:
    """Rotary tables have no rows for such positions."""
    round_ = Round(*[600] * (2 if longer == "canonical" else 1), seed=11)
    members = members_of(round_, 20 if longer == "canonical" else 500)
    if longer == "canonical":
        spec = members[0].spec
        piece = spec.pieces[0]
        members[0].spec = msgspec.structs.replace(
            spec, pieces=[piece], token_ids=spec.token_ids[: piece.start + piece.tokens]
        )
    with pytest.raises(Exception, match="tokens, expected at most 1024"):
        engine.run(spec_of(round_, members, NONE))


def test_a_pass_with_nothing_left_to_compute_is_one_too(engine: Engine) -> None:
    """All of it is kept from the pass before; then of a prompt that has less."""
    longer, shorter = under(Round(70, 40, seed=7), "no rows"), under(Round(70, seed=7), "no rows")
    answers = []
    for round_ in (longer, longer, shorter, shorter):
        members = members_of(round_, 40)
        members[0].prompt = members[0].spec.token_ids + tokens(12, 77)
        members[0].spec = msgspec.structs.replace(members[0].spec, history="no rows")
        found = engine.run(spec_of(round_, members, NONE)).members[members[0].spec.request_id]
        assert found.prompt == found.local + found.reused + (0 if answers else 40)
        answers += engine.answers(members, load=True)
        engine.release(members)
    assert found.local == found.prompt
    first, again_, short, short_again = answers
    assert first == again_, "a pass without rows answers as the one that had some"
    assert short == short_again != first


@pytest.fixture
def cramped(model: Path) -> Iterator[Engine]:
    """Steps of 64 tokens, and room for 640."""
    engine = Engine(model, max_model_len=512, max_num_batched_tokens=64, num_gpu_blocks_override=21)
    assert engine.call("td_why_no_passes") is None
    yield engine
    engine.close()


def test_what_follows_a_load_may_take_several_steps(cramped: Engine) -> None:
    round_ = Round(70, 33)
    members = [Member(round_, tokens(40, 51), "one", task=300)]
    exact = cramped.answers(members, load=False)
    cramped.run(spec_of(round_, members, FULL))
    assert cramped.answers(members, load=True) == exact
    cramped.release(members)


def test_members_are_computed_in_batches_and_what_is_given_up_between_two_is_released(
    cramped: Engine,
) -> None:
    """Each has more rows than half a step: every one is a batch, of as many slices as layers."""
    round_ = Round(70)

    def slices(members: list[Member], up_to: int = 999) -> int:
        cramped.call("td_begin", pack(spec_of(round_, members, NONE)))
        for number in range(1, up_to + 1):
            if cramped.call("td_step", 0.0) is not None:
                return number
        return up_to

    first, one, three = (members_of(round_, *each) for each in ((40,), (40,), (40, 41, 42)))
    slices(first)  # it leaves the canonical sequence
    alone = slices(one)
    assert slices(three) - alone == 2 * LAYERS
    assert cramped.mirrors() == 5
    cramped.release([*first, *one, *three])
    slices(members_of(round_, 40, 41, 42), up_to=alone + 1)
    assert cramped.mirrors() == 1, "of the first batch"
    cramped.call("td_abort")
    assert cramped.mirrors() == 0


def test_a_member_that_is_preempted_loads_again(cramped: Engine) -> None:
    """Three answers do not fit together: who gives its pages up finds its KV where it was."""
    round_ = Round(70, 33)
    members = members_of(round_, 40, 50, 60)
    exact = [cramped.answers([member], load=False, max_tokens=90)[0] for member in members]
    cramped.run(spec_of(round_, members, FULL))
    assert cramped.answers(members, load=True, max_tokens=90) == exact
    assert cramped.preemptions > 0, "or this would prove nothing"
    cramped.release(members)
    assert cramped.mirrors() == 0


def test_two_ranks_choose_the_same_and_answer_as_one_does(model: Path, engine: Engine) -> None:
    """Tensor parallel, each with half of the heads: what they see is summed before it is ranked."""
    round_ = Round(70, 33, 5)
    members = members_of(round_, 40, 0, 131)
    rule = Rule(name=RuleName.HKVD, ratio=0.3, depth=0.5, weighed=True)
    engine.run(spec_of(round_, members, rule))
    wanted = engine.answers(members, load=True)
    exact = engine.answers(members, load=False)
    engine.release(members)
    pair = Engine(model, tensor_parallel_size=2)
    try:
        assert pair.call("td_why_no_passes") is None
        found = pair.run(spec_of(round_, members, rule))
        assert [one.selected for one in found.members.values()] == [round(0.3 * 108)] * 3
        assert pair.answers(members, load=True) == wanted
        pair.release(members)
        again = members_of(round_, 40, 0, 131)  # by other names: nothing cached is theirs
        for one, other in zip(members, again, strict=True):
            other.prompt = one.prompt
        pair.run(spec_of(round_, again, FULL))
        assert pair.answers(again, load=True) == exact
        pair.release(again)
        assert pair.mirrors() == 0
    finally:
        pair.close()


def test_what_the_prefix_cache_has_is_not_loaded_again(engine: Engine) -> None:
    """Asked twice under one salt: the second time the engine itself has whole blocks of it."""
    round_ = Round(70, 33, seed=12)
    members = members_of(round_, 45, 64)
    engine.run(spec_of(round_, members, FULL))
    ready = [ready_parameters(one.spec.request_id, one.spec.token_ids) for one in members]
    prompts = [one.prompt for one in members]
    salts = [f"twice-{one.spec.request_id}" for one in members]
    first = engine.generate(prompts, ready, salts, 16)
    longer = [prompt + tokens(5, 3) for prompt in prompts]
    again = engine.generate([*prompts, *longer], [*ready, *ready], [*salts, *salts], 16)
    assert again == [*first, *engine.generate(longer, [None, None], None, 16)]
    engine.release(members)
