"""Wire structs: they survive the way, and what is not theirs is refused before it is believed."""

import contextlib
import string
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from td_serve import types
from td_serve.types import (
    ADMITTED,
    AgentId,
    AgentOutput,
    Canonical,
    ChoiceDelta,
    ConversationKey,
    Delta,
    Epoch,
    Forecast,
    GenerateRequest,
    Handle,
    Handover,
    LeaseId,
    MemberHandover,
    MemberPass,
    MemberPlan,
    Membership,
    Mode,
    PassResult,
    PassSpec,
    PassTokens,
    Piece,
    Placement,
    Registered,
    ReplicaId,
    ReplicaState,
    RequestId,
    RoundPlan,
    RoundPrefill,
    RoundRecord,
    Rule,
    RuleName,
    Said,
    SegmentKey,
    SessionId,
    Source,
    Span,
    TokenLogprob,
    WireVersionError,
    pack,
    unpack,
)

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
counts = st.integers(0, 2**40)
token_ids = st.lists(st.integers(0, 2**31), max_size=4)
floats = st.floats(allow_nan=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | words | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
tables = st.dictionaries(words, plain, max_size=3)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


memberships = st.builds(
    Membership,
    sim=words.map(SessionId),
    agent=words.map(AgentId),
    round=maybe(counts),
    n_agents=maybe(counts),
    deadline_ms=maybe(counts),
    position=maybe(counts),
)
requests = st.builds(
    GenerateRequest,
    request_id=words.map(RequestId),
    prompt_token_ids=token_ids,
    sampling=st.binary(max_size=16),
    n=st.integers(1, 4),
    hand_over=st.booleans(),
    cache_salt=maybe(words),
    priority=st.integers(-5, 5),
    reasoning_ended=maybe(st.booleans()),
    reasoning_parser_kwargs=maybe(tables),
    membership=maybe(memberships),
)
handovers = st.builds(
    Handover,
    request_id=words.map(RequestId),
    replica=words.map(ReplicaId),
    kv=tables,
    lease_s=floats,
    prompt_tokens=counts,
    cached_tokens=counts,
)
logprobs = st.lists(
    st.builds(TokenLogprob, token_id=counts, logprob=floats, rank=maybe(counts), text=maybe(words)),
    max_size=2,
)
deltas = st.builds(
    Delta,
    choices=st.lists(
        st.builds(
            ChoiceDelta,
            index=st.integers(0, 3),
            text=words,
            token_ids=token_ids,
            logprobs=maybe(st.lists(logprobs, max_size=2)),
            cumulative_logprob=maybe(floats),
            finish_reason=maybe(words),
            stop_reason=maybe(words | counts),
        ),
        max_size=2,
    ),
    finished=st.booleans(),
    cached_tokens=counts,
    prompt_logprobs=maybe(st.lists(maybe(logprobs), max_size=2)),
)
segments = words.map(SegmentKey)
plans = st.builds(
    RoundPlan,
    sim=words.map(SessionId),
    round=counts,
    members=st.lists(
        st.builds(
            MemberPlan,
            agent=words.map(AgentId),
            request_id=words.map(RequestId),
            mode=st.sampled_from(Mode),
            prompt_tokens=counts,
            layout=st.lists(
                st.builds(
                    Placement,
                    segment=maybe(segments),
                    start=counts,
                    tokens=counts,
                    source=st.sampled_from(Source),
                ),
                max_size=2,
            ),
            reason=maybe(st.sampled_from(types.Alone)),
        ),
        max_size=2,
    ),
    canonical=st.lists(segments, max_size=2),
    absent=counts,
)
messages: dict[type, st.SearchStrategy[Any]] = {
    Membership: memberships,
    GenerateRequest: requests,
    Handover: handovers,
    Delta: deltas,
    RoundPlan: plans,
    RoundPrefill: st.builds(RoundPrefill, plan=plans, requests=st.lists(requests, max_size=2)),
    MemberHandover: st.builds(
        MemberHandover,
        request_id=words.map(RequestId),
        handover=maybe(handovers),
        error=maybe(words),
    ),
    Handle: st.builds(
        Handle,
        lease=words.map(LeaseId),
        conversation=words.map(ConversationKey),
        replica=words.map(ReplicaId),
        epoch=counts.map(Epoch),
        host=words,
        port=st.integers(1024, 65535),
        tp_size=counts,
        block_size=counts,
        block_ids=st.lists(token_ids, max_size=2),
        tokens=counts,
        digests=st.binary(max_size=64),
        tail=token_ids,
        remaining_s=st.floats(0, 480),
        prefilled_by=maybe(words.map(ReplicaId)),
    ),
    RoundRecord: st.builds(
        RoundRecord,
        sim=words.map(SessionId),
        round=counts,
        outputs=st.lists(
            st.builds(AgentOutput, agent=words.map(AgentId), text=words, token_ids=token_ids),
            max_size=3,
        ),
    ),
    ReplicaState: st.builds(
        ReplicaState,
        replica=words.map(ReplicaId),
        role=words,
        epoch=counts.map(Epoch),
        host=words,
        nixl_port=st.integers(1024, 65535),
        transports=st.lists(words, max_size=2),
        running=counts,
        waiting=counts,
        kv_usage=st.floats(0, 1),
    ),
    PassSpec: st.builds(
        PassSpec,
        canonical=st.builds(
            Canonical,
            key=words.map(SegmentKey),
            token_ids=token_ids,
            segments=st.lists(st.builds(Span, start=counts, tokens=counts), max_size=2),
        ),
        rule=st.builds(Rule, name=st.sampled_from(RuleName), k=counts),
        members=st.lists(
            st.builds(
                MemberPass,
                request_id=words.map(RequestId),
                history=words,
                token_ids=token_ids,
                pieces=st.lists(
                    st.builds(Piece, start=counts, tokens=counts, source=counts), max_size=2
                ),
            ),
            max_size=2,
        ),
    ),
    PassResult: st.builds(
        PassResult,
        members=st.dictionaries(
            words,
            st.builds(
                PassTokens, prompt=counts, local=counts, reused=counts, selected=counts, new=counts
            ),
            max_size=2,
        ),
    ),
    Forecast: st.builds(
        Forecast,
        sim=words.map(SessionId),
        last=st.builds(
            Canonical,
            key=words.map(SegmentKey),
            token_ids=token_ids,
            segments=st.lists(st.builds(Span, start=counts, tokens=counts), max_size=2),
        ),
        grows=st.booleans(),
        said=st.lists(st.builds(Said, before=words, now=st.none() | words), max_size=2),
    ),
    Registered: st.builds(
        Registered,
        epoch=counts.map(Epoch),
        superseded=st.lists(words.map(LeaseId), max_size=2),
    ),
}
kinds = sorted(messages, key=lambda kind: kind.__name__)
any_message = st.one_of(*messages.values())


def test_every_message_kind_is_covered_here() -> None:
    assert set(messages) == set(get_args(types.Message))
    tags = [msgspec.inspect.type_info(kind).tag for kind in kinds]  # type: ignore[attr-defined]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("kind", kinds)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_messages_come_out_as_they_went_in(kind: type, data: st.DataObject) -> None:
    message = data.draw(messages[kind])
    assert unpack(pack(message), kind) == message


@settings(max_examples=50, deadline=None)
@given(any_message, st.integers(0, 2**16 - 1).filter(lambda v: v != types.WIRE_VERSION))
def test_another_version_is_refused_by_number(message: types.Message, version: int) -> None:
    data = version.to_bytes(2, "big") + pack(message)[2:]
    with pytest.raises(
        WireVersionError, match=rf"version {version} .* expected {types.WIRE_VERSION}\b"
    ):
        unpack(data, type(message))


@given(st.binary(max_size=64))
def test_the_version_is_compared_before_anything_is_decoded(payload: bytes) -> None:
    with pytest.raises(WireVersionError, match=f"wire version {types.WIRE_VERSION + 1} "):
        unpack((types.WIRE_VERSION + 1).to_bytes(2, "big") + payload, Delta)


@settings(max_examples=50, deadline=None)
@given(any_message, st.sampled_from(kinds))
def test_another_kind_is_refused_by_name(message: types.Message, kind: type) -> None:
    if type(message) is kind:
        return
    with pytest.raises(
        WireVersionError, match=rf"got a {type(message).__name__}, expected a {kind.__name__}"
    ):
        unpack(pack(message), kind)


@settings(max_examples=50, deadline=None)
@given(any_message, st.data())
def test_a_truncated_message_is_refused(message: types.Message, data: st.DataObject) -> None:
    packed = pack(message)
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(WireVersionError):
        unpack(packed[:cut], type(message))


@settings(max_examples=200, deadline=None)
@given(any_message, st.sampled_from(kinds), st.data())
def test_a_garbled_message_is_refused_or_of_the_kind_asked_for(
    message: types.Message, kind: type, data: st.DataObject
) -> None:
    packed = bytearray(pack(message))
    for at in data.draw(st.lists(st.integers(2, len(packed) - 1), max_size=3)):
        packed[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireVersionError):
        assert type(unpack(bytes(packed), kind)) is kind


@given(st.binary(max_size=64))
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(WireVersionError):
        unpack(b"\x00\x01" + payload, Membership)


@given(st.sampled_from(kinds), st.text(string.ascii_lowercase, min_size=1), st.data())
def test_unknown_fields_are_refused(kind: type, name: str, data: st.DataObject) -> None:
    message = data.draw(messages[kind])
    version, payload = pack(message)[:2], pack(message)[2:]
    fields = msgspec.msgpack.decode(payload)
    if name in fields:
        return
    packed = version + msgspec.msgpack.encode({**fields, name: 1})
    with pytest.raises(WireVersionError, match=f"unknown field `{name}`"):
        unpack(packed, kind)


@settings(max_examples=25, deadline=None)
@given(any_message)
def test_messages_do_not_change(message: types.Message) -> None:
    for name in message.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(message, name, getattr(message, name))


def test_all_structs_of_the_wire_are_frozen_and_strict() -> None:
    structs = [
        kind
        for kind in vars(types).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    ]
    assert set(kinds) < set(structs)
    for struct in structs:
        assert struct.__struct_config__.frozen, struct
        assert struct.__struct_config__.forbid_unknown_fields, struct


def test_admitted_carries_nothing() -> None:
    assert not ADMITTED.choices
    assert not ADMITTED.finished
    assert unpack(pack(ADMITTED), Delta) == ADMITTED
