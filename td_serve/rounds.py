"""The rounds API's own prompts: a whole round in one request. Pure.

The server composes what each agent reads, and only here may it order text: the last round's outputs
stand in one order for all agents, word for word, so that a prefill engine can recognise them.

    history_first   system | preamble  system_i         user | private_i  outputs…  task_i
    shared_first    system | preamble                   user | outputs…  system_i  private_i  task_i
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from td_serve import strict
from td_serve.errors import BadRequest
from td_serve.segments import mark
from td_serve.tenants import session
from td_serve.types import AgentId, AgentOutput, Membership, TenantId

T = TypeVar("T", bound=msgspec.Struct)

JOIN = "\n\n"

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
# Numbers that every process and every JSON parser can hold.
Count = Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)]
Index = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what clients send to endpoints of ours: strict, unlike OpenAI's."""


class RoundField(_Body, frozen=True, kw_only=True):
    """`td_round` in an OpenAI request: which round of which simulation this agent's request is."""

    sim: Name
    round: Index
    agent: Name
    n_agents: Count
    deadline_ms: Count | None = None
    exact: bool = False

    def membership(self, tenant: TenantId) -> Membership:
        """The place in the round of the tenant's own simulation of that name."""
        return Membership(
            sim=session(tenant, self.sim),
            agent=AgentId(self.agent),
            round=self.round,
            n_agents=self.n_agents,
            deadline_ms=self.deadline_ms,
            exact=self.exact,
        )


class RoundAgent(_Body, frozen=True, kw_only=True):
    """One agent of a round: who it is, what only it knows, what it is to do."""

    agent: Name
    system: str = ""
    private: str = ""
    task: str = ""
    exact: bool = False


class SharedText(_Body, frozen=True, kw_only=True):
    """What an agent put out in the last round, handed in by the client."""

    agent: Name
    text: str


class RoundRequest(_Body, frozen=True, kw_only=True):
    """`POST /v1/rounds`: a whole round at once.

    The outputs of round `round` - 1 are the server's own record of it; `shared` replaces them.
    `completion` holds parameters of chat completions (`max_tokens`, `temperature`, …) for all.
    `exact`, of all or of one agent, has prompts prefilled as they are.
    """

    model: str
    sim: Name
    round: Index
    agents: Annotated[list[RoundAgent], msgspec.Meta(min_length=1)]
    preamble: str = ""
    layout: Literal["history_first", "shared_first"] = "history_first"
    shared: list[SharedText] | None = None
    deadline_ms: Count | None = None
    stream: bool = True
    exact: bool = False
    completion: dict[str, Any] = {}


_OURS = ("model", "messages", "stream", "stream_options", "td_round", "request_id")


def read(body: dict[str, Any], parameters: Set[str]) -> RoundRequest:
    """The round that a body asks for. `parameters` are those of chat completions.

    Raises BadRequest.
    """
    known = {field.name for field in msgspec.structs.fields(RoundRequest)}
    for name in body:
        if name not in known and name in parameters and name not in _OURS:
            raise BadRequest(
                f"{name}: a parameter of chat completions goes into `completion`", name
            )
    request = decode_body(body, RoundRequest)
    for agent, times in Counter(one.agent for one in request.agents).items():
        if times > 1:
            raise BadRequest(f"agents: {agent!r} stands {times} times, expected once", "agents")
    for name in request.completion:
        place = f"completion.{name}"
        if name in _OURS:
            raise BadRequest(f"{place}: set by the server", place)
        if name not in parameters:
            hint = strict.nearest(name, sorted(parameters))
            raise BadRequest(f"{place}: unknown key {name!r}, {hint}", place)
    return request


def messages(
    request: RoundRequest, agent: RoundAgent, shared: Sequence[AgentOutput]
) -> list[dict[str, str]]:
    """What one agent reads, cut into segments. Silent agents are left out of the shared part."""
    said = [output.text for output in shared if output.text]
    if request.layout == "history_first":
        system = [request.preamble, agent.system]
        user = [agent.private, *said, agent.task]
    else:
        system = [request.preamble]
        user = [*said, agent.system, agent.private, agent.task]
    return [
        {"role": role, "content": mark([part for part in parts if part], JOIN)}
        for role, parts in (("system", system), ("user", user))
        if any(parts)
    ]


def check_filled(request: RoundRequest, shared: Sequence[AgentOutput]) -> None:
    """Every agent has something to read. Raises BadRequest."""
    if request.preamble or any(output.text for output in shared):
        return
    for agent in request.agents:
        if not (agent.system or agent.private or agent.task):
            raise BadRequest(f"agents: {agent.agent!r} has nothing to read", "agents")


def membership(tenant: TenantId, request: RoundRequest, position: int) -> Membership:
    """The place of the tenant's request's agent number `position` in the round."""
    return Membership(
        sim=session(tenant, request.sim),
        agent=AgentId(request.agents[position].agent),
        round=request.round,
        n_agents=len(request.agents),
        deadline_ms=request.deadline_ms,
        position=position,
        exact=request.exact or request.agents[position].exact,
    )


def decode_body(data: object, kind: type[T], field: str = "") -> T:
    """Decode part of a client's body. `field` is its path there. Raises BadRequest."""
    try:
        return strict.decode(data, kind, path=field)
    except strict.Wrong as error:
        message = str(error).removeprefix(".")
        raise BadRequest(message, field=error.path or None) from None
