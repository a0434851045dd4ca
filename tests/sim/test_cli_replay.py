"""`td-serve replay` where no server is needed: what is refused, on one line with exit code 2."""

import argparse
import json
import socket
from pathlib import Path

import pytest

from td_serve.cli.replay import _command, add_parser
from td_serve.errors import ReplayError, TdServeError, TraceError

VILLAGE = str(Path(__file__).parents[2] / "examples" / "village.jsonl")


@pytest.fixture
def no_server() -> str:
    """An address of this machine where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["replay", *words])
    code: int = args.func(args)
    return code


def test_a_refused_connection_is_one_clear_line(no_server: str) -> None:
    with pytest.raises(ReplayError) as caught:
        run(VILLAGE, "--url", no_server)
    assert str(caught.value).startswith(f"no server at {no_server}")
    assert "\n" not in str(caught.value)


def test_a_malformed_trace_is_refused_before_the_server_is_asked(
    no_server: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"type":"header","schema":"other/1"}\n')
    with pytest.raises(TraceError, match=r"bad.jsonl:1: \$.schema is 'other/1'"):
        run(str(path), "--url", no_server)


def test_a_trace_without_outputs_asks_for_live(no_server: str, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in Path(VILLAGE).read_text().splitlines()]
    for line in lines[1:]:
        for turn in line["agents"]:
            turn["output"] = None
    path = tmp_path / "seed.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ReplayError, match=r"no output of 'Marta' in round 0: play it with --live"):
        run(str(path), "--url", no_server)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--agents", "5"], r"agents is 5"),
        (["--rounds", "7"], r"rounds is 7"),
        (["--first-round", "6"], r"first round is 6"),
        (["--max-concurrency", "3"], r"max concurrency is 3, .* all 4 agents.*--no-round"),
    ],
)
def test_options_that_do_not_fit_the_trace_are_refused(
    words: list[str], said: str, no_server: str
) -> None:
    with pytest.raises(TdServeError, match=said):
        run(VILLAGE, "--url", no_server, *words)


@pytest.mark.parametrize(
    "words", [["--agents", "0"], ["--layout", "other"], ["--window", "-1"], ["--first-round", "-1"]]
)
def test_values_out_of_range_are_usage_errors(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(VILLAGE, "--url", "http://127.0.0.1:1/v1", *words)
    assert caught.value.code == 2


def test_the_key_is_not_written_into_reports() -> None:
    shown = _command(["/usr/bin/td-serve", "replay", "t", "--api-key", "secret", "--api-key=more"])
    assert shown == ["td-serve", "replay", "t", "--api-key", "***", "--api-key=***"]
