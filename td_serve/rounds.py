"""The rounds API's own prompts: a whole round in one request. Pure.

The server composes what each agent reads, and only here may it order text: the last round's outputs
stand in one order for all agents, word for word, so that a prefill engine can recognise them.

    history_first   system | preamble  system_i         user | private_i  outputs…  task_i
    shared_first    system | preamble                   user | outputs…  system_i  private_i  task_i
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from td_serve.errors import BadRequest
from td_serve.segments import mark
from td_serve.tenants import session
from td_serve.types import AgentId, AgentOutput, Membership, TenantId

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


def check(request: RoundRequest) -> None:
    """What the types cannot say. Raises BadRequest."""
    for agent, times in Counter(one.agent for one in request.agents).items():
        if times > 1:
            raise BadRequest(f"agents: {agent!r} stands {times} times, expected once", "agents")
    for name in _OURS:
        if name in request.completion:
            raise BadRequest(f"completion.{name}: set by the server", f"completion.{name}")


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


def decode_body(data: object, kind: type[Any], field: str | None = None) -> Any:
    """Decode part of a client's body. `field` is its path there. Raises BadRequest."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        path = ((field or "") + where.removesuffix("`")).strip(".") or None
        got = _at(data, where.removesuffix("`"))
        said = f"{what}, got {got!r}" if isinstance(got, str | int | float) else what
        raise BadRequest(f"{path}: {said}" if path else said, field=path) from None


def _at(data: Any, path: str) -> Any:
    """The part of `data` at msgspec's path (`.agents[0].task`); None where there is none."""
    for step in path.replace("[", ".[").strip(".").split("."):
        if step.startswith("[") and isinstance(data, list):
            data = data[int(step[1:-1])] if step[1:-1].isdecimal() else None
        elif isinstance(data, dict):
            data = data.get(step)
    return data
