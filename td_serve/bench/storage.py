"""What a round's KV takes when it is kept as a family, on a recorded trace.

One engine in this process plays rounds one after the other by a preset's rule; after each the bytes
of what is kept for the members are counted. Beside them stands the bound: every shared token once,
every private one as it is.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from td_serve.bench.pass_engine import PassEngine
from td_serve.bench.presets import Preset
from td_serve.bench.trace_rounds import Prompts, Round
from td_serve.errors import TdServeError
from td_serve.reuse import Reuse, plan_reuse
from td_serve.sim.layouts import Layout
from td_serve.sim.trace import read_trace
from td_serve.store.codecs import LOSSLESS, Codec, Codecs
from td_serve.store.sizes import FamilySize
from td_serve.types import PassSpec, SessionId

ADDED_KL_BOUND = {Codec.INT8: 1e-5, Codec.INT4: 2e-4}
"""Nats that a codec may add, on average over the last tokens of members' prompts."""
_SCORED = 32


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds 1 to `last` of a trace, of its first `agents` agents (None: all), by each preset, kept
    lossless and by each pair of codecs. What those add is measured on the first `scored` members.
    """

    trace: Path
    model: str
    presets: tuple[Preset, ...]
    codecs: tuple[Codecs, ...]
    agents: int | None = None
    last: int = 8
    layout: Layout = Layout.TRANSCRIPT
    window: int = 8192
    dtype: str = "float32"
    scored: int = 2


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept after a round, in bytes; ratios are of dense bytes to kept ones.

    A mirror's are its references, diffs, private KV and index; the group's those of all mirrors and
    the master. `_shared`: of what is shared alone. `bound_mirror` and `bound_group` are the ratios
    if every shared token was kept once and every private one as it is. `block_sparse` ratios are of
    one member's dense copy and what 32-token blocks of the others differ by (TokenDance, section
    4.3). `added_kl` is what the codecs add, and `refused` says that it is more than they may.
    `lossless` says that what is kept is what the round's pass has made, bit for bit.
    """

    preset: Preset
    diffs_by: Codec
    private_by: Codec
    round: int
    mirrors: int
    dense: int
    master: int
    references: int
    diffs: int
    private: int
    index: int
    mirror_ratio: float
    group_ratio: float
    mirror_ratio_shared: float
    group_ratio_shared: float
    bound_mirror: float
    bound_group: float
    blocks_mean: float
    blocks_changed_mean: float
    block_sparse_mirror_ratio: float
    block_sparse_group_ratio: float
    block_sparse_mirror_ratio_shared: float
    lossless: bool
    added_kl: float | None = None
    refused: bool = False


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Of the first preset, kept lossless, after the last round. `of_bound` are its ratios over
    the bound's; `lossless` is of all rounds."""

    mirror_ratio: float
    group_ratio: float
    mirror_ratio_shared: float
    group_ratio_shared: float
    blocks_changed_mean: float
    mirror_of_bound: float
    group_of_bound: float
    lossless: bool


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All that was counted. `cut` prompts did not fit the window as they were."""

    rows: list[Row]
    summary: Summary
    cut: int


def bench_storage(options: Options, say: Callable[[str], None]) -> Result:
    """Count on an engine of our own. `say` tells the progress.

    Raises TdServeError when the trace does not fit, or in a round there is nothing in common.
    """
    from td_serve.models.resolve import resolve

    trace = read_trace(options.trace)
    Prompts.check(trace, options.agents, options.last)
    prompts = Prompts(resolve(options.model), options.window, 1)
    rounds = prompts.rounds(trace, options.agents, 0, options.last + 1, options.layout)
    say("starting the engine")
    # A few prompts at once: how long it takes does not matter.
    engine = PassEngine(resolve(options.model), options.dtype, options.window, 4 * options.window)
    rows: list[Row] = []
    for preset in options.presets:
        # What codecs add is measured against what lossless ones give.
        for codecs in (LOSSLESS, *(one for one in options.codecs if one != LOSSLESS)):
            engine.keep_by(codecs)
            sim = SessionId(f"{trace.name}-{uuid.uuid4().hex}")
            rows += _play(engine, sim, rounds, preset, codecs, options, say)
    if not rows:
        raise TdServeError(f"trace {trace.name!r}: every round was served exactly: nothing is kept")
    return Result(rows=rows, summary=_summary(rows), cut=prompts.cuts)


def _play(
    engine: PassEngine,
    sim: SessionId,
    rounds: Sequence[Round],
    preset: Preset,
    codecs: Codecs,
    options: Options,
    say: Callable[[str], None],
) -> list[Row]:
    rows: list[Row] = []
    for number, round_ in enumerate(rounds):
        reuse = plan_reuse(sim, round_, preset.rule, next(iter(round_.values())).head)
        if number and not reuse.passes:
            raise TdServeError(
                f"session {sim!r}: no two of the {len(round_)} agents have anything in common in "
                f"round {number}: there is nothing to count"
            )
        added = None
        if number == len(rounds) - 1:
            added = _added(engine, reuse.passes[0], round_, options.scored)
        engine.play_passes(round_, reuse, sim, together=True, release=False)
        found = engine.sizes(reuse)
        lossless = engine.is_kept_exactly(reuse)
        engine.release(reuse)
        if not number:
            continue
        if not found.mirrors:
            say(f"round {number}, {preset.value}: served exactly, nothing is kept as a family")
            continue
        rows.append(_row(preset, codecs, number, found, _bound(reuse, round_), lossless, added))
        say(
            f"round {number}, {preset.value}, diffs {codecs.diffs.value}, private "
            f"{codecs.private.value}: {rows[-1].mirror_ratio:.1f} per mirror, "
            f"{rows[-1].group_ratio:.1f} for the group"
        )
    return rows


def _added(engine: PassEngine, spec: PassSpec, round_: Round, scored: int) -> float:
    """What codecs have added to what follows behind the histories of the first members."""
    some = msgspec.structs.replace(spec, members=spec.members[:scored])
    by_request = {str(one.request_id): one.prompt_token_ids for one in round_.values()}
    prompts = [by_request[member.request_id] for member in some.members]
    found = engine.added(some, prompts, _SCORED)
    return statistics.mean(kl for member in found for kl in member)


def _bound(reuse: Reuse, round_: Round) -> tuple[float, float]:
    """Ratios for a mirror and the group if all that is shared was kept once."""
    dense = sum(len(one.prompt_token_ids) for one in round_.values())
    shared = sum(
        piece.tokens for spec in reuse.passes for one in spec.members for piece in one.pieces
    )
    once = sum(span.tokens for spec in reuse.passes for span in spec.canonical.segments)
    return dense / (dense - shared), dense / (dense - shared + once)


def _row(
    preset: Preset,
    codecs: Codecs,
    number: int,
    found: FamilySize,
    bound: tuple[float, float],
    lossless: bool,
    added: float | None,
) -> Row:
    def total(name: str) -> int:
        return sum(getattr(one, name) for one in found.mirrors)

    dense = total("dense")
    kv_bytes = dense // total("tokens")
    shared = total("shared") * kv_bytes
    of_shared = total("references") + total("diffs")
    own = of_shared + total("private") + total("index")
    # The member that is kept as it is, in the paper's layout, is no mirror.
    others = [one for one in found.mirrors if one.block_sparse != one.dense]
    sparse = sum(one.block_sparse for one in others)
    sparse_shared = sum(one.block_sparse_shared for one in others)
    return Row(
        preset=preset,
        diffs_by=codecs.diffs,
        private_by=codecs.private,
        round=number,
        mirrors=len(found.mirrors),
        dense=dense,
        master=found.master,
        references=total("references"),
        diffs=total("diffs"),
        private=total("private"),
        index=total("index"),
        mirror_ratio=round(dense / own, 3),
        group_ratio=round(dense / (found.master + own), 3),
        mirror_ratio_shared=round(shared / of_shared, 3),
        group_ratio_shared=round(shared / (found.master + of_shared), 3),
        bound_mirror=round(bound[0], 3),
        bound_group=round(bound[1], 3),
        blocks_mean=round(total("blocks") / len(found.mirrors), 2),
        blocks_changed_mean=round(total("blocks_changed") / len(found.mirrors), 2),
        block_sparse_mirror_ratio=round(sum(one.dense for one in others) / max(1, sparse), 3),
        block_sparse_group_ratio=round(dense / total("block_sparse"), 3),
        block_sparse_mirror_ratio_shared=round(
            sum(one.shared for one in others) * kv_bytes / max(1, sparse_shared), 3
        ),
        lossless=lossless,
        added_kl=None if added is None else round(added, 9),
        refused=_is_refused(codecs, added),
    )


def _is_refused(codecs: Codecs, added: float | None) -> bool:
    both = (codecs.diffs, codecs.private)
    bounds = [ADDED_KL_BOUND[one] for one in both if one in ADDED_KL_BOUND]
    return bool(bounds) and added is not None and added > max(bounds)


def _summary(rows: Sequence[Row]) -> Summary:
    first = rows[0]
    what = (first.preset, first.diffs_by, first.private_by)
    ours = [row for row in rows if (row.preset, row.diffs_by, row.private_by) == what]
    last = ours[-1]
    return Summary(
        mirror_ratio=last.mirror_ratio,
        group_ratio=last.group_ratio,
        mirror_ratio_shared=last.mirror_ratio_shared,
        group_ratio_shared=last.group_ratio_shared,
        blocks_changed_mean=last.blocks_changed_mean,
        mirror_of_bound=round(last.mirror_ratio / last.bound_mirror, 3),
        group_of_bound=round(last.group_ratio / last.bound_group, 3),
        lossless=all(row.lossless for row in ours),
    )
