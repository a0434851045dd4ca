"""The rounds API's prompts: the shared part is word for word the same for all, in one order."""

from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from td_serve import rounds
from td_serve.errors import BadRequest
from td_serve.rounds import RoundField, RoundRequest, decode_body
from td_serve.segments import SEPARATOR
from td_serve.types import OPEN, AgentId, AgentOutput, Membership, SessionId

words = st.text("abc é", max_size=6)
shared_texts = st.lists(st.builds(AgentOutput, agent=words.map(AgentId), text=words), max_size=4)


def make(layout: str = "history_first", /, **fields: Any) -> RoundRequest:
    body = {
        "model": "m",
        "sim": "village",
        "round": 3,
        "agents": [
            {"agent": "ada", "system": "You are Ada.", "private": "A secret.", "task": "Go on."},
            {"agent": "bo", "system": "You are Bo.", "task": "Go on."},
        ],
        "layout": layout,
        **fields,
    }
    request: RoundRequest = decode_body(body, RoundRequest)
    return request


SHARED = [
    AgentOutput(agent=AgentId("bo"), text="Bo said this."),
    AgentOutput(agent=AgentId("cyd"), text=""),
    AgentOutput(agent=AgentId("ada"), text="Ada said that."),
]


def marked(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """With a bar where a segment begins or ends."""
    return [
        {**message, "content": message["content"].replace(SEPARATOR, "|")} for message in messages
    ]


def test_history_first_puts_each_agent_before_what_all_share() -> None:
    request = make(preamble="A village.")
    assert marked(rounds.messages(request, request.agents[0], SHARED)) == [
        {"role": "system", "content": "|A village.\n\n|You are Ada.|"},
        {
            "role": "user",
            "content": "|A secret.\n\n|Bo said this.\n\n|Ada said that.\n\n|Go on.|",
        },
    ]


def test_shared_first_puts_what_all_share_before_each_agent() -> None:
    request = make("shared_first", preamble="A village.")
    assert marked(rounds.messages(request, request.agents[0], SHARED)) == [
        {"role": "system", "content": "|A village.|"},
        {
            "role": "user",
            "content": "|Bo said this.\n\n|Ada said that.\n\n"
            "|You are Ada.\n\n|A secret.\n\n|Go on.|",
        },
    ]


@settings(max_examples=100, deadline=None)
@given(
    shared=shared_texts,
    preamble=words,
    parts=st.lists(st.tuples(words, words, words), min_size=2, max_size=4),
    layout=st.sampled_from(["history_first", "shared_first"]),
)
def test_all_agents_read_the_shared_part_word_for_word(
    shared: list[AgentOutput],
    preamble: str,
    parts: list[tuple[str, str, str]],
    layout: str,
) -> None:
    agents = [
        {"agent": f"agent {i}", "system": system, "private": private, "task": task}
        for i, (system, private, task) in enumerate(parts)
    ]
    request = make(layout, preamble=preamble, agents=agents)
    said = [output.text for output in shared if output.text]
    block = (rounds.JOIN + SEPARATOR).join(said)
    assume(block)
    for agent in request.agents:
        messages = rounds.messages(request, agent, shared)
        user = messages[-1]
        assert user["role"] == "user"
        assert block in user["content"]
        if layout == "shared_first":
            assert user["content"].startswith(SEPARATOR + block)
        assert all(message["content"] for message in messages)


def test_an_agent_with_nothing_to_read_is_refused_by_name() -> None:
    request = make(agents=[{"agent": "mute"}])
    with pytest.raises(BadRequest, match="'mute' has nothing to read") as caught:
        rounds.check_filled(request, [])
    assert caught.value.field == "agents"


def test_places_in_the_round_follow_the_requests_order() -> None:
    request = make(deadline_ms=500)
    assert [rounds.membership(OPEN, request, i) for i in range(2)] == [
        Membership(
            sim=SessionId("village"),
            agent=AgentId(name),
            round=3,
            n_agents=2,
            deadline_ms=500,
            position=position,
        )
        for position, name in enumerate(("ada", "bo"))
    ]


@pytest.mark.parametrize(
    ("of_all", "of_one", "wanted"),
    [(False, False, [False, False]), (False, True, [False, True]), (True, False, [True, True])],
)
def test_who_is_to_be_answered_exactly_is(of_all: bool, of_one: bool, wanted: list[bool]) -> None:
    agents = [{"agent": "ada", "task": "x"}, {"agent": "bo", "task": "x", "exact": of_one}]
    request = make(agents=agents, exact=of_all)
    assert [rounds.membership(OPEN, request, i).exact for i in range(2)] == wanted
    place = {"sim": "village", "round": 1, "agent": "bo", "n_agents": 2, "exact": of_one}
    field: RoundField = decode_body(place, RoundField, "td_round")
    assert field.membership(OPEN).exact == of_one


PARAMETERS = {"model", "messages", "stream", "max_tokens", "temperature"}


def test_an_agent_named_twice_is_refused() -> None:
    body = msgspec.to_builtins(make())
    agent = {"agent": "ada", "task": "x"}
    with pytest.raises(BadRequest, match="'ada' stands 3 times, expected once"):
        rounds.read({**body, "agents": [agent, agent, agent]}, PARAMETERS)
    assert rounds.read(body, PARAMETERS) == make()


@pytest.mark.parametrize(
    "name",
    ["model", "messages", "stream", "stream_options", "td_round", "request_id"],
)
def test_what_the_server_sets_is_not_the_clients_to_set(name: str) -> None:
    with pytest.raises(BadRequest, match=f"completion.{name}: set by the server") as caught:
        rounds.read(msgspec.to_builtins(make(completion={name: None})), PARAMETERS)
    assert caught.value.field == f"completion.{name}"


def test_td_round_is_a_membership() -> None:
    body = {"sim": "village", "round": 0, "agent": "ada", "n_agents": 2}
    field: RoundField = decode_body(body, RoundField, "td_round")
    assert field.membership(OPEN) == Membership(
        sim=SessionId("village"), agent=AgentId("ada"), round=0, n_agents=2
    )


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"agents": []}, "agents", "length >= 1"),
        ({"agents": [{"agent": ""}]}, "agents[0].agent", "length >= 1"),
        ({"agents": [{"agent": "a"}, {"agent": 3}]}, "agents[1].agent", "Expected `str`"),
        ({"agents": [{"agent": "a", "tsk": ""}]}, "agents[0].tsk", "did you mean 'task'?"),
        ({"layout": "shared_last"}, "layout", "shared_last"),
        ({"round": -1}, "round", ">= 0"),
        ({"round": 2**53}, "round", "<= 9007199254740991"),
        ({"shared": [{"agent": "a"}]}, "shared[0]", "missing required field `text`"),
        ({"deadline_ms": 0}, "deadline_ms", ">= 1"),
        ({"sim": "s" * 257}, "sim", "length <= 256"),
        ({"rond": 1}, "rond", "unknown key 'rond', did you mean 'round'?"),
    ],
)
def test_a_wrong_body_is_refused_with_the_place(
    body: dict[str, Any], field: str | None, message: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        make(**body)
    assert caught.value.field == field
    assert message in caught.value.message
    assert caught.value.message.startswith(f"{field}: ")
