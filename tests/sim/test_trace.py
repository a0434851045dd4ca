"""Reading traces: what is accepted, and how what is not is told."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from td_serve.errors import TraceError
from td_serve.sim.trace import Trace, read_trace
from tests.sim.strategies import traces

ROOT = Path(__file__).parents[2]
VILLAGE = ROOT / "examples" / "village.jsonl"
RECORDED = sorted((ROOT.parent / "shared" / "traces").glob("*.jsonl.gz"))


def lines(trace: Trace) -> list[bytes]:
    return [msgspec.json.encode(line) for line in (trace.header, *trace.rounds)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(trace=traces(nulls=True))
def test_a_written_trace_reads_back_the_same(trace: Trace, tmp_path: Path) -> None:
    text = b"\n".join(lines(trace)) + b"\n\n"
    (tmp_path / "t.jsonl").write_bytes(text)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(text))
    assert read_trace(tmp_path / "t.jsonl") == trace
    assert read_trace(tmp_path / "t.jsonl.gz") == trace


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_recorded_traces_are_read_whole(path: Path) -> None:
    trace = read_trace(path)
    sizes = {
        entry["trace"]: entry for entry in json.loads((path.parent / "stats.json").read_text())
    }
    expected = sizes[trace.name]
    assert len(trace.header.agents) == expected["agents"]
    assert len(trace.rounds) == expected["rounds"]
    silent = sum(not turn.output for round_ in trace.rounds for turn in round_.agents)
    assert silent == expected["silent"]


def test_fields_the_format_does_not_name_are_ignored(village: Trace, tmp_path: Path) -> None:
    text = [json.loads(line) for line in lines(village)]
    for line in text:
        line["remark"] = {"of": "ours"}
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, text)))
    assert read_trace(path) == village


def _set(line: int, *path: str | int) -> Callable[[Any], Callable[[list[Any]], None]]:
    def to(value: Any) -> Callable[[list[Any]], None]:
        def change(text: list[Any]) -> None:
            at = text[line]
            for step in path[:-1]:
                at = at[step]
            at[path[-1]] = value

        return change

    return to


def _remove(line: int, *path: str | int) -> Callable[[list[Any]], None]:
    def change(text: list[Any]) -> None:
        at = text[line]
        for step in path[:-1]:
            at = at[step]
        del at[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set(0, "schema")("allgather-trace/2"), [":1:", "$.schema", "/2'", "allgather-trace/1"]),
        (_remove(0, "schema"), [":1:", "$.schema", "None", "allgather-trace/1"]),
        (_set(0, "type")("round"), [":1:", "$.type", "'round'", "'header'"]),
        (_set(0, "agents")([]), [":1:", "$.agents", "[]", "length >= 1"]),
        (_set(0, "agents", 1, "agent_id")("Marta"), [":1:", "$.agents[1].agent_id", "'Marta'"]),
        (_set(0, "agents", 2, "profile")(7), [":1:", "$.agents[2].profile is 7", "`str`"]),
        (_set(0, "rounds")(7), [":1:", "$.rounds is 7", "6 rounds follow"]),
        (_set(3, "type")("header"), [":4:", "$.type", "'header'", "'round'"]),
        (_set(3, "round")(4), [":4:", "$.round is 4", "expected 2"]),
        (_set(3, "round")("2"), [":4:", "$.round is '2'", "`int`"]),
        (_remove(3, "agents", 0, "task"), [":4:", "$.agents[0]", "`task`"]),
        (_set(3, "agents", 0, "task")(""), [":4:", "$.agents[0].task is ''", "length >= 1"]),
        (_remove(3, "agents", 0, "output"), [":4:", "$.agents[0]", "`output`"]),
        (_set(3, "agents", 0, "agent_id")("Nobody"), [":4:", "agents[0].agent_id", "'Nobody'"]),
        (_set(3, "agents", 0, "agent_id")("Osk"), [":4:", "agents[1].agent_id", "second time"]),
        (_set(3, "order", 0)("Nobody"), [":4:", "$.order", "permutation", "'Nobody'"]),
        (_remove(3, "order", 0), [":4:", "$.order has 3 ids for 4 agents", "permutation"]),
        (_set(3, "order", 0)("Pell"), [":4:", "$.order", "permutation"]),
    ],
)
def test_a_malformed_trace_is_refused_by_line_field_value_and_expectation(
    change: Callable[[list[Any]], None], said: list[str], village: Trace, tmp_path: Path
) -> None:
    text = [json.loads(line) for line in lines(village)]
    change(text)
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(map(json.dumps, text)))
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"{", ":1: not JSON"),
        (b'"\xff"', ":1: not JSON"),
        (b"[1]", ":1: $.type is [1]"),
        (gzip.compress(VILLAGE.read_bytes())[:-20], "cannot be read"),
        (b"\x1f\x8b\x08 and no more", "cannot be read"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert said in str(caught.value)


def test_a_missing_file_is_told_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none.jsonl: cannot be read: .*No such file"):
        read_trace(tmp_path / "none.jsonl")
