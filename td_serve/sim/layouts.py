"""Layouts: where an agent's text stands in its prompt. Pure.

A layout is a function from a `View` to a `Prompt`: chat messages made of parts. Three rules hold
for all of them, so that a server can find the shared text again:

- The shared blocks stand in ONE order, the one the trace gives, for every agent.
- A shared block is verbatim, with the speaker's name only where the trace has it. Other parts lose
  the line breaks at their ends.
- Parts of a message are joined by one blank line. Empty parts and empty messages are left out.
"""

import enum
from collections.abc import Callable, Iterable

import msgspec

from td_serve.sim.workload import SharedRound, View
from td_serve.types import AgentId

JOIN = "\n\n"

NEUTRAL_SYSTEM = (
    "You take part in a simulation that several agents play in rounds. First comes what everybody "
    "said in the last round, then who you are and what you know, and at the end what to do now."
)
"""The system text of `shared_first`: it names nobody, so it is the same for all agents."""


class Kind(enum.Enum):
    """What a part of a prompt is."""

    NEUTRAL = "neutral"
    PREAMBLE = "preamble"
    PROFILE = "profile"
    HISTORY = "history"
    SHARED = "shared"
    TASK = "task"


class Part(msgspec.Struct, frozen=True):
    """A run of text with an identity of its own."""

    kind: Kind
    round: int
    """The round that was first given this text; 0 for what always holds."""
    agent: AgentId
    """Whose text it is: the speaker of a shared block, else the reader."""
    text: str


class Message(msgspec.Struct, frozen=True):
    """One chat message."""

    role: str
    parts: tuple[Part, ...]

    @property
    def content(self) -> str:
        return JOIN.join(part.text for part in self.parts)


class Prompt(msgspec.Struct, frozen=True):
    """One agent's prompt in one round."""

    agent: AgentId
    round: int
    messages: tuple[Message, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in prompt order."""
        return tuple(part for message in self.messages for part in message.parts)

    def chat(self) -> list[dict[str, str]]:
        """The messages as the chat API takes them."""
        return [{"role": m.role, "content": m.content} for m in self.messages]


class Layout(enum.Enum):
    """The layouts by name; `build` carries one out."""

    HISTORY_FIRST = "history_first"
    SHARED_FIRST = "shared_first"
    TRANSCRIPT = "transcript"


def build(layout: Layout, view: View) -> Prompt:
    """Lay out one agent's prompt."""
    return _LAYOUTS[layout](view)


def history_first(view: View) -> Prompt:
    """Who I am, what I know, what was said, what to do: the order the trace's README gives.

    ```
    system | preamble  profile_i
    user   | history_i[0..t]   out_a[t-1]  out_b[t-1]  ...   task_i[t]
           '--- grows, private '--- same for all, at other positions for each agent
    ```
    Only the profile and the older history are a prefix that lasts from round to round.
    """
    return _prompt(
        view,
        system=(*_preamble(view), *_profile(view)),
        user=(*_history(view), *_shared(view, view.shared[-1:]), *_task(view)),
    )


def shared_first(view: View) -> Prompt:
    """What was said, who I am, what I know, what to do: the shared part is a prefix of all prompts.

    ```
    system | neutral  preamble                                      (the same for all)
    user   | out_a[t-1]  out_b[t-1]  ...   profile_i  history_i[0..t]   task_i[t]
           '--- the same for all, at the same positions
    ```
    An ordinary prefix cache shares the head of a round among its agents, and nothing from round to
    round but the system text.
    """
    neutral = _part(view, Kind.NEUTRAL, 0, NEUTRAL_SYSTEM)
    return _prompt(
        view,
        system=(*neutral, *_preamble(view)),
        user=(
            *_shared(view, view.shared[-1:]),
            *_profile(view),
            *_history(view),
            *_task(view),
        ),
    )


def transcript(view: View) -> Prompt:
    """Everything in the order it happened; nothing said is forgotten.

    ```
    system | preamble  profile_i
    user   | history_i[0]   history_i[1]  outs[0]   ...   history_i[t]  outs[t-1]   task_i[t]
           '--- the prompt of round t-1 without its task '--- new
    ```
    Each prompt begins with the last one up to its task: all of it is a prefix that lasts, until the
    window is full and the oldest round is dropped.
    """
    said = {shared.round: shared for shared in view.shared}
    body: list[Part] = []
    for round_ in range(view.round + 1):
        body += _history(view, only=round_)
        if round_ in said:
            body += _shared(view, (said[round_],))
    return _prompt(
        view,
        system=(*_preamble(view), *_profile(view)),
        user=(*body, *_task(view)),
    )


_LAYOUTS: dict[Layout, Callable[[View], Prompt]] = {
    Layout.HISTORY_FIRST: history_first,
    Layout.SHARED_FIRST: shared_first,
    Layout.TRANSCRIPT: transcript,
}


def _prompt(view: View, system: Iterable[Part], user: Iterable[Part]) -> Prompt:
    messages = (Message("system", tuple(system)), Message("user", tuple(user)))
    return Prompt(view.agent, view.round, tuple(m for m in messages if m.parts))


def _part(view: View, kind: Kind, round_: int, text: str) -> tuple[Part, ...]:
    """One part of the reader's own, trimmed; none if nothing is left."""
    text = text.strip("\r\n")
    return (Part(kind, round_, view.agent, text),) if text.strip() else ()


def _preamble(view: View) -> tuple[Part, ...]:
    return _part(view, Kind.PREAMBLE, 0, view.preamble)


def _profile(view: View) -> tuple[Part, ...]:
    return _part(view, Kind.PROFILE, 0, view.profile)


def _history(view: View, only: int | None = None) -> tuple[Part, ...]:
    return tuple(
        part
        for entry in view.history
        if only is None or entry.round == only
        for part in _part(view, Kind.HISTORY, entry.round, entry.text)
    )


def _shared(view: View, rounds: Iterable[SharedRound]) -> tuple[Part, ...]:
    """Blocks as they are: their text is what the server knows them by."""
    return tuple(
        Part(Kind.SHARED, shared.round, block.speaker, block.text)
        for shared in rounds
        for block in shared.blocks
    )


def _task(view: View) -> tuple[Part, ...]:
    return _part(view, Kind.TASK, view.round, view.task)
