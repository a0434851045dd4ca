"""The command `td-serve`: one module per sub-command, imported when the command starts.

A module here offers `add_parser(subparsers)`, which sets `func` to a function from the parsed
arguments to an exit code, and imports what is heavy inside that function: `--help` is quick.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from td_serve.errors import TdServeError

COMMANDS = ("model", "key", "check", "replay", "bench")

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def build_parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The command line of the sub-commands `names`; imports their modules and no others."""
    parser = argparse.ArgumentParser(
        prog="td-serve", description="Serve rounds of many agents on vLLM and Ray."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in names:
        importlib.import_module(f"{__name__}.{name}").add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `td-serve` with `argv` (default: the process's own); returns its exit code.

    0: done; 2: wrong usage, or an error of ours, told in one line; 130: interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    # Only the module that is asked for, where one is; `--help` and typing errors need them all.
    names = argv[:1] if argv and argv[0] in COMMANDS else COMMANDS
    try:
        arguments = build_parser(names).parse_args(argv)
        code: int = arguments.func(arguments)
        sys.stdout.flush()  # a reader that has gone shows here, not after main has returned
        return code
    except TdServeError as error:
        print(f"td-serve: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("td-serve: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # `td-serve … | head` is no error. Python flushes stdout once more at exit: let it succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
