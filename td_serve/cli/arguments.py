"""What benches are told, and where they write what they find."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from td_serve.errors import TdServeError

DTYPES = ("float32", "bfloat16", "float16")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more")
    return value


def numbers(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def check_outputs(args: argparse.Namespace) -> None:
    """Raises TdServeError where what is measured could not be written in the end."""
    for path in (args.json, args.plot):
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            raise TdServeError(f"{path}: cannot be written: {path.absolute().parent} is no folder")


def write_report(path: Path | None, seed: int, rows: Any, summary: Any) -> None:
    """Write what was found as the command's report, where a file for it is named.

    Raises TdServeError.
    """
    from td_serve.report import envelope, write_json

    if path is not None:
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
        write_json(path, envelope(command, seed, rows, summary))


def tell(line: str) -> None:
    """Show how far a bench has come."""
    print(line, file=sys.stderr, flush=True)
