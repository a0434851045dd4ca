"""`td-serve check FILE…`: are these cluster files right?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from td_serve.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "check",
        help="check cluster files strictly",
        description="Check cluster files: every key, at every level, against what Ray Serve and "
        "td_serve know. Exits with 2 when one is wrong. Notes tell of settings that say nothing.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each file, and one for each setting in it that nobody reads.

    Returns 2 when a file is wrong, 0 else.
    """
    from td_serve.serve.check import check_file

    wrong = 0
    for path in arguments.files:
        try:
            found = check_file(path)
        except ConfigError as error:
            print(f"td-serve: error: {error}", file=sys.stderr)
            wrong += 1
        else:
            for config in found.applications:
                print(
                    f"{path}: ok: {config.model}, {config.prefill.num_replicas} prefill, "
                    f"{config.decode.num_replicas} decode"
                )
            if not found.applications:
                print(f"{path}: ok, but no application of it is td_serve's")
            for one in found.unread:
                print(f"{path}: note: {one.place}: {one.value!r} has no effect: {one.why}")
    return 2 if wrong else 0
