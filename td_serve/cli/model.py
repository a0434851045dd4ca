"""`td-serve model`: fetch, make and list models."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from td_serve.models import cache
from td_serve.models.catalog import CATALOG
from td_serve.models.random_model import LIKE, RandomModel

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Add `model` and its three sub-commands."""
    model = subparsers.add_parser("model", help="fetch, make and list models")
    commands = model.add_subparsers(title="commands", metavar="COMMAND", required=True)

    fetch = commands.add_parser("fetch", help="bring a model of the catalogue into the cache")
    fetch.add_argument("name", metavar="NAME", help=", ".join(CATALOG))
    fetch.set_defaults(func=run_fetch)

    listing = commands.add_parser("list", help="show the catalogue and what is in the cache")
    listing.set_defaults(func=run_list)

    random = commands.add_parser(
        "random",
        help="write a small model of a named architecture with random weights",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = RandomModel()
    random.add_argument("--like", choices=LIKE, default=default.like, help="architecture")
    random.add_argument("--out", type=Path, required=True, help="directory to create")
    for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "seed"):
        random.add_argument(
            f"--{field.replace('_', '-')}", type=int, default=getattr(default, field), help=" "
        )
    random.set_defaults(func=run_random)


def run_fetch(arguments: argparse.Namespace) -> int:
    """Fetch one model and print its directory, alone on stdout."""
    from td_serve.models.fetch import fetch

    print(fetch(arguments.name))
    return 0


def run_random(arguments: argparse.Namespace) -> int:
    """Write one random model and print its directory, alone on stdout."""
    from td_serve.models.random_model import write_random

    print(
        write_random(
            arguments.out,
            like=arguments.like,
            layers=arguments.layers,
            hidden=arguments.hidden,
            heads=arguments.heads,
            kv_heads=arguments.kv_heads,
            head_dim=arguments.head_dim,
            intermediate=arguments.intermediate,
            seed=arguments.seed,
        )
    )
    return 0


def run_list(arguments: argparse.Namespace) -> int:
    """Print one line per model of the catalogue: name, size, state, path."""
    rows = [("NAME", "SIZE", "CACHED", "PATH")]
    for model in CATALOG.values():
        path = cache.model_dir(model.name)
        cached = cache.is_model(path)
        size = cache.size_on_disk(path) if cached else model.disk_bytes
        rows.append((model.name, f"{size / 1e6:.0f} MB", "yes" if cached else "no", str(path)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]))
    return 0
