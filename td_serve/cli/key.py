"""`td-serve key`: a new API key for a tenant."""

from __future__ import annotations

import argparse
import secrets

from td_serve.tenants import digest

_BYTES = 32
"""More than anybody can try: that is why a plain digest of a key gives nothing away."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "key",
        help="make an API key for a tenant",
        description="Print a new random API key, and the line that lets it in: its SHA-256, for "
        "the tenant's list under `args.tenants` in the cluster file. The key is stored nowhere.",
    )
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the key, then the line of the cluster file."""
    key = f"td-{secrets.token_urlsafe(_BYTES)}"
    print("API key, for the client alone:")
    print(f"  {key}")
    print("SHA-256, for args.tenants in the cluster file:")
    # In quotes: YAML would take some digests for numbers.
    print(f'  - "{digest(key)}"')
    return 0
