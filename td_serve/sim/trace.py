"""Traces in the format `allgather-trace/1`: JSON Lines, plain or gzipped, read and checked whole.

Line 1 is the header; each further line is one round, numbered 0, 1, 2, ... without gaps. Fields the
format does not name are ignored: sources add their own notes. Whatever is wrong raises `TraceError`
naming the file, the line, the field, the value found and what was expected.
"""

import gzip
import re
import zlib
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from td_serve.errors import TraceError
from td_serve.types import AgentId

SCHEMA = "allgather-trace/1"

_GZIP_MAGIC = b"\x1f\x8b"
_FIELD_OF_ERROR = re.compile(r"^(?P<what>.*?)(?: - at `(?P<field>\$.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_SHOWN = 60  # characters of a bad value worth showing

_Line = TypeVar("_Line")


class Agent(msgspec.Struct, frozen=True):
    """One agent and who it is."""

    agent_id: Annotated[AgentId, msgspec.Meta(min_length=1)]
    profile: str


class Header(msgspec.Struct, frozen=True):
    """What a trace says about itself."""

    type: Literal["header"]
    schema: Literal["allgather-trace/1"]
    trace: Annotated[str, msgspec.Meta(min_length=1)]
    agents: Annotated[tuple[Agent, ...], msgspec.Meta(min_length=1)]
    rounds: Annotated[int, msgspec.Meta(ge=1)]
    preamble: str = ""
    """Text that all agents read before their profile."""
    scenario: str = ""
    language: str = ""

    @property
    def agent_ids(self) -> tuple[AgentId, ...]:
        """All agents, in the order listed."""
        return tuple(agent.agent_id for agent in self.agents)


class Turn(msgspec.Struct, frozen=True):
    """What one agent read for itself in a round, and what it said."""

    agent_id: AgentId
    history_append: str
    """Private; the agent's history is all of these up to its round."""
    task: Annotated[str, msgspec.Meta(min_length=1)]
    output: str | None
    """Empty: the agent was silent. None: nothing was recorded, the served model is to write it."""


class Round(msgspec.Struct, frozen=True):
    """One synchronous step of all its agents."""

    type: Literal["round"]
    round: Annotated[int, msgspec.Meta(ge=0)]
    label: str
    order: tuple[AgentId, ...]
    """The order in which next round's readers find this round's outputs."""
    agents: Annotated[tuple[Turn, ...], msgspec.Meta(min_length=1)]

    def turn(self, agent: AgentId) -> Turn | None:
        """The agent's turn in this round; None if it takes no part."""
        return next((turn for turn in self.agents if turn.agent_id == agent), None)


class Trace(msgspec.Struct, frozen=True):
    """A whole trace: `rounds[t].round == t`."""

    header: Header
    rounds: tuple[Round, ...]

    @property
    def name(self) -> str:
        return self.header.trace


def read_trace(path: Path) -> Trace:
    """Read and check a trace file.

    Raises:
        TraceError: the file cannot be read, or does not hold to the format.
    """
    lines = _lines(path)
    if not lines:
        raise TraceError(f"{path}: empty; expected a header of the format {SCHEMA}")
    header = _header(lines[0], f"{path}:1")
    rounds: list[Round] = []
    for number, line in enumerate(lines[1:], start=2):
        round_ = _decode(line, Round, f"{path}:{number}", "round")
        _check_round(round_, len(rounds), set(header.agent_ids), f"{path}:{number}")
        rounds.append(round_)
    if len(rounds) != header.rounds:
        raise TraceError(
            f"{path}:1: $.rounds is {header.rounds}, but {len(rounds)} rounds follow: "
            "expected the two to agree (is the file cut off?)"
        )
    return Trace(header=header, rounds=tuple(rounds))


def _lines(path: Path) -> list[bytes]:
    """The file's lines, unpacked; blank lines at its end are dropped."""
    try:
        raw = path.read_bytes()
        if raw.startswith(_GZIP_MAGIC):
            raw = gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    return raw.rstrip().split(b"\n") if raw.strip() else []


def _header(line: bytes, where: str) -> Header:
    header = _decode(line, Header, where, "header")
    ids = header.agent_ids
    for index, agent in enumerate(ids):
        if agent in ids[:index]:
            raise TraceError(
                f"{where}: $.agents[{index}].agent_id is {agent!r}, which an earlier agent has: "
                "expected an id of its own"
            )
    return header


def _check_round(round_: Round, expected: int, known: set[AgentId], where: str) -> None:
    """Check what the types cannot say: numbering, ids and order."""
    if round_.round != expected:
        raise TraceError(
            f"{where}: $.round is {round_.round}: expected {expected} "
            "(rounds count up from 0 without gaps)"
        )
    seen: set[AgentId] = set()
    for index, turn in enumerate(round_.agents):
        if turn.agent_id not in known:
            raise TraceError(
                f"{where}: $.agents[{index}].agent_id is {turn.agent_id!r}: "
                "expected an agent of the header"
            )
        if turn.agent_id in seen:
            raise TraceError(
                f"{where}: $.agents[{index}].agent_id is {turn.agent_id!r} for the second time: "
                "expected each agent once in a round"
            )
        seen.add(turn.agent_id)
    if len(round_.order) != len(seen) or set(round_.order) != seen:
        strangers = [str(agent) for agent in set(round_.order) ^ seen] or ["a repeated id"]
        raise TraceError(
            f"{where}: $.order has {len(round_.order)} ids for {len(seen)} agents: expected a "
            f"permutation of this round's agents; it differs in {_short(sorted(strangers))}"
        )


def _decode(line: bytes, kind: type[_Line], where: str, tag: str) -> _Line:
    """Decode one line, translating msgspec's error into one that shows the value."""
    try:
        value: object = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{where}: not JSON: {error}") from error
    found = value.get("type") if isinstance(value, dict) else value
    if found != tag:
        raise TraceError(f"{where}: $.type is {_short(found)}: expected {tag!r}")
    if tag == "header" and isinstance(value, dict) and value.get("schema") != SCHEMA:
        raise TraceError(
            f"{where}: $.schema is {_short(value.get('schema'))}: expected {SCHEMA!r}, "
            "the only format known here"
        )
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        match = _FIELD_OF_ERROR.match(str(error))
        what, field = match.groups() if match else (str(error), None)
        field = field or "$"
        shown = _short(_at(value, field))
        raise TraceError(f"{where}: {field} is {shown}: {what}") from error


def _at(value: object, field: str) -> object:
    """The value at a path such as `$.agents[3].task`."""
    for key, index in _STEP.findall(field):
        if key and isinstance(value, dict):
            value = value.get(key)
        elif index and isinstance(value, list):
            value = value[int(index)]
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
