"""The storage bench's result as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from td_serve.bench.storage import Result, Row
from td_serve.errors import TdServeError
from td_serve.store.codecs import Codec

_PAPER = (
    "TokenDance, figure 12: 11.2 (7B) and 17.5 (14B) per mirror, of shared KV, as one member's "
)
_COUNTS = "dense copy and blocks of 32 tokens"


def table(result: Result) -> Table:
    """After each round: bytes by kind, and ratios to dense ones, beside their bounds."""
    made = Table(
        title="kept for a round's members, MB; ratios of dense bytes to kept ones / their bounds",
        caption=_PAPER,
    )
    for name in (
        "round",
        "kept",
        "dense",
        "master",
        "diffs",
        "private",
        "mirror",
        "group",
        "shared",
        "changed",
        "sparse",
        "added KL",
    ):
        made.add_column(name, justify="left" if name == "kept" else "right", no_wrap=True)
    for row in result.rows:
        made.add_row(*_cells(row))
    return made


def _cells(row: Row) -> list[str]:
    added = "" if row.added_kl is None else f"{row.added_kl:.1e}"
    return [
        str(row.round),
        _kept(row),
        *(f"{part / 1e6:.1f}" for part in (row.dense, row.master, row.diffs, row.private)),
        f"{row.mirror_ratio:.1f}/{row.bound_mirror:.1f}",
        f"{row.group_ratio:.1f}/{row.bound_group:.1f}",
        f"{row.mirror_ratio_shared:.1f}",
        f"{row.blocks_changed_mean:.0f}/{row.blocks_mean:.0f}",
        f"{row.block_sparse_mirror_ratio:.1f}",
        f"{added} refused" if row.refused else added,
    ]


def _kept(row: Row) -> str:
    """By which rule and codecs."""
    private = "" if row.private_by is Codec.LOSSLESS else f"+{row.private_by.value}"
    return f"{row.preset.value} {row.diffs_by.value}{private}"


def plot(result: Result, title: str, path: Path) -> None:
    """Ratios over the rounds, of mirrors and groups, beside their bounds.

    Raises TdServeError when the picture cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    per_mirror, group = figure.subplots(1, 2)
    first = result.rows[0]
    for name in dict.fromkeys(_kept(row) for row in result.rows):
        rows = [row for row in result.rows if _kept(row) == name]
        numbers = [one.round for one in rows]
        per_mirror.plot(numbers, [one.mirror_ratio for one in rows], marker="o", label=name)
        group.plot(numbers, [one.group_ratio for one in rows], marker="o", label=name)
    ours = [one for one in result.rows if one.preset is first.preset]
    bounds = {one.round: one for one in ours}
    for axes, which in ((per_mirror, "bound_mirror"), (group, "bound_group")):
        axes.plot(
            list(bounds),
            [getattr(one, which) for one in bounds.values()],
            color="black",
            linestyle="--",
            label="bound, lossless",
        )
        axes.set_xlabel("round")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
    per_mirror.set_title("per mirror")
    group.set_title("group")
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise TdServeError(f"{path}: cannot be written: {error}") from error
