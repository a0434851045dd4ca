"""What prefilling a round as one unit saves, and what it costs in fidelity, on a recorded trace.

One engine in this process. Each way plays some rounds before (which warm what it keeps) and then
the measured one, from the same prompts: vLLM's own prefix caching, the same with the shared text
first, and passes by each rule, together and member by member. A rule's speed is printed only after
a pass that computes everything has given the engine's own tokens.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from td_serve.bench.authors import Authors
from td_serve.bench.fidelity import SCORED, Measured, fidelity
from td_serve.bench.pass_engine import PassEngine, Played
from td_serve.bench.presets import Preset
from td_serve.bench.reuse_rows import (
    SHARED_FIRST,
    VLLM,
    Result,
    Row,
    Tokens,
    ahead,
    serial,
    summarise,
)
from td_serve.bench.trace_rounds import Prompts, Round
from td_serve.errors import TdServeError
from td_serve.reuse import Reuse, plan_reuse
from td_serve.segments import alike
from td_serve.sim.layouts import Layout
from td_serve.sim.trace import Trace, read_trace
from td_serve.types import SessionId


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`rounds` rounds of a trace from `first` on, each after the `past` rounds before it.

    Prompts have `layout`, except where the shared text is put first to compare. The trace's first
    `agents` agents take part (None: all), and hear all that spoke.
    """

    trace: Path
    model: str
    presets: tuple[Preset, ...]
    agents: int | None = None
    first: int = 1
    rounds: int = 1
    past: int = 1
    layout: Layout = Layout.HISTORY_FIRST
    window: int = 8192
    dtype: str = "float32"
    speed: bool = True
    fidelity: bool = False


@dataclass(frozen=True)
class _Asked:
    """A round of the trace: what is asked in it, with the shared text first, too; and the turns in
    which was said what it hears."""

    number: int
    members: Round
    shared_first: Round
    authors: Authors


def bench_reuse(options: Options, say: Callable[[str], None]) -> Result:
    """Measure on an engine of our own. `say` tells the progress.

    Raises TdServeError when the trace does not fit, or a pass that computes everything disagrees
    with the engine.
    """
    from td_serve.models.resolve import resolve

    if options.past > options.first:
        raise TdServeError(
            f"--past: {options.past}, expected at most {options.first}: there are no more rounds "
            f"before round {options.first}"
        )
    trace = read_trace(options.trace)
    Prompts.check(trace, options.agents, options.first + options.rounds - 1)
    prompts = Prompts(resolve(options.model), options.window, SCORED)
    first = options.first - options.past
    span = (options.agents, first, options.rounds + options.past)
    asked = prompts.rounds(trace, *span, options.layout)
    cut = prompts.cuts
    rounds = [
        _Asked(
            number,
            members,
            prompts.rounds(trace, options.agents, number, 1, Layout.SHARED_FIRST)[0],
            _authors(trace, number - 1, options, prompts),
        )
        for number, members in enumerate(asked, first)
    ]
    say("starting the engine")
    most = max(sum(_tokens(one.members)) for one in rounds)
    room = max(3 * most, 2 * options.window)  # or the engine would not take the window
    engine = PassEngine(resolve(options.model), options.dtype, options.window, room)
    bench = _Bench(engine, SessionId(trace.name), options.presets)
    rows: list[Row] = []
    measured: dict[tuple[Preset, bool], Measured] = {}
    for place in range(options.past, len(rounds)):
        past, round_ = rounds[place - options.past : place], rounds[place]
        say(f"round {round_.number}: is a pass that computes everything exact?")
        answers = bench.check_exact(past, round_)
        if options.fidelity:
            say(f"round {round_.number}: fidelity")
            bench.measure(past, round_, answers, measured)
        if options.speed:
            rows += bench.race(past, round_, say)
    close = [fidelity(*which, found) for which, found in measured.items()]
    summary = summarise(options.presets[0], rows, close, bench.tokens)
    return Result(rows=rows, fidelity=close, summary=summary, cut=cut)


def _authors(trace: Trace, number: int, options: Options, prompts: Prompts) -> Authors:
    """Those who spoke in a round, where any preset reads what they said."""
    is_read = number >= 0 and any(preset.reads_authors for preset in options.presets)
    spoken = prompts.spoken(trace, number, options.layout) if is_read else []
    return Authors(number, spoken, options.window)


class _Bench:
    """One engine, and the ways to play a round on it."""

    def __init__(self, engine: PassEngine, sim: SessionId, presets: Sequence[Preset]) -> None:
        self._engine = engine
        self._sim = sim
        self._presets = presets
        self.tokens: list[Tokens] = []

    def check_exact(self, past: Sequence[_Asked], round_: _Asked) -> dict[str, list[int]]:
        """What the engine itself answers.

        Raises TdServeError when a pass that computes everything answers otherwise, or when there is
        none.
        """
        if not self._plan(round_, Preset.FULL, "").passes:
            raise TdServeError(
                f"trace {self._sim!r}: no two of the {len(round_.members)} agents have anything in "
                "common in this round: there is nothing to measure"
            )
        salt = uuid.uuid4().hex
        wanted = self._engine.play_plain(round_.members, salt, max_tokens=SCORED).answers
        self._warm(past, Preset.FULL, salt)
        found = self._blend(round_, Preset.FULL, salt, max_tokens=SCORED).answers
        if found != wanted:
            wrong = [agent for agent in wanted if found[agent] != wanted[agent]]
            raise TdServeError(
                f"a pass that computes everything answers otherwise than the engine, for "
                f"{', '.join(wrong)}: no speed is measured"
            )
        return wanted

    def race(self, past: Sequence[_Asked], round_: _Asked, say: Callable[[str], None]) -> list[Row]:
        """Every way, one after the other, each after the rounds before."""
        rows = []
        for way, play in self._ways(past, round_):
            self._engine.forget()
            played = play()
            rows.append(
                Row(
                    round=round_.number,
                    way=way,
                    seconds=round(played.seconds, 3),
                    **_phases(played),
                    computed=played.computed,
                    selected=sum(one.selected for one in played.counted),
                    blended=len(played.counted),
                )
            )
            say(f"round {round_.number}, {way}: {played.seconds:.1f} s")
        return rows

    def _ways(
        self, past: Sequence[_Asked], round_: _Asked
    ) -> list[tuple[str, Callable[[], Played]]]:
        def plain(*rounds: Round) -> Callable[[], Played]:
            def play() -> Played:
                salt = uuid.uuid4().hex
                *before, now = rounds
                for one in before:
                    self._engine.play_plain(one, salt)
                return self._engine.play_plain(now, salt)

            return play

        def blended(
            preset: Preset, *, together: bool = True, is_given: bool = False
        ) -> Callable[[], Played]:
            def play() -> Played:
                salt = uuid.uuid4().hex
                self._warm(past, preset, salt)
                if is_given:
                    reuse = self._plan(round_, preset, salt)
                    self._engine.bring(reuse, round_.authors)
                    self._engine.prepare(reuse)
                played = self._blend(round_, preset, salt, together=together)
                if together and not is_given and preset is self._presets[0]:
                    self.tokens.append(_counted(played))
                return played

            return play

        return [
            (VLLM, plain(*(one.members for one in [*past, round_]))),
            (SHARED_FIRST, plain(*(one.shared_first for one in [*past, round_]))),
            *((preset.value, blended(preset)) for preset in self._presets),
            (ahead(self._presets[0]), blended(self._presets[0], is_given=True)),
            *((serial(preset), blended(preset, together=False)) for preset in self._one_by_one()),
        ]

    def _one_by_one(self) -> list[Preset]:
        """The presets that are played member by member, too."""
        first, *others = self._presets
        return [first, *(preset for preset in others if preset is Preset.PAPER)]

    def measure(
        self,
        past: Sequence[_Asked],
        round_: _Asked,
        answers: dict[str, list[int]],
        measured: dict[tuple[Preset, bool], Measured],
    ) -> None:
        """Add each member's divergences, agreements and match lengths to `measured`. Prompts begin
        with what the rounds before have left."""
        for preset in self._presets:
            salt = uuid.uuid4().hex
            self._warm(past, preset, salt)
            self._score(round_, answers, preset, salt, measured)
            said = self._blend(round_, preset, salt, max_tokens=SCORED).answers
            measured[preset, False].match += [
                alike(answers[agent], said[agent]) for agent in answers
            ]

    def _score(
        self,
        round_: _Asked,
        answers: dict[str, list[int]],
        preset: Preset,
        salt: str,
        measured: dict[tuple[Preset, bool], Measured],
    ) -> None:
        """Divergences and agreements of a preset, and of a random choice of as much."""
        reuse = self._plan(round_, preset, salt)
        spec = reuse.passes[0]
        self._engine.bring(reuse, round_.authors)
        by_request = {str(one.request_id): agent for agent, one in round_.members.items()}
        # Of an answer's tokens all but the last are read.
        prompts = [
            [*round_.members[agent].prompt_token_ids, *answers[agent][: SCORED - 1]]
            for agent in (by_request[str(member.request_id)] for member in spec.members)
        ]
        which = [(preset, False), (preset, True)][: 1 + preset.chooses]
        asked = [(preset.rule, at_random) for _, at_random in which]
        for one, score in zip(which, self._engine.score(spec, prompts, asked, SCORED), strict=True):
            found = measured.setdefault(one, Measured())
            found.kl += score.kl
            found.same += score.same
            found.chosen.append(score.chosen)
            found.alone += score.alone

    def _warm(self, past: Sequence[_Asked], preset: Preset, salt: str) -> None:
        """The rounds before, in the same way: they leave histories and a header."""
        for one in past:
            self._blend(one, preset, salt)

    def _blend(
        self,
        round_: _Asked,
        preset: Preset,
        salt: str,
        *,
        together: bool = True,
        max_tokens: int = 1,
    ) -> Played:
        reuse = self._plan(round_, preset, salt)
        self._engine.bring(reuse, round_.authors)
        return self._engine.play_passes(round_.members, reuse, salt, together, max_tokens)

    def _plan(self, round_: _Asked, preset: Preset, salt: str) -> Reuse:
        turns = round_.authors.turns if preset.reads_authors else None
        sim = SessionId(f"{self._sim}-{salt}")
        return plan_reuse(sim, round_.members, preset.rule, _head(round_.members), turns)


def _head(round_: Round) -> list[int]:
    return next(iter(round_.values())).head


def _tokens(round_: Round) -> list[int]:
    return [len(one.prompt_token_ids) for one in round_.values()]


def _phases(played: Played) -> dict[str, float]:
    spent = {f"{phase}_s": round(seconds, 3) for phase, seconds in played.spent.items()}
    return {**spent, "suffix_s": round(played.seconds - sum(played.spent.values()), 3)}


def _counted(played: Played) -> Tokens:
    return Tokens(
        prompt=sum(one.prompt for one in played.counted),
        local=sum(one.local for one in played.counted),
        reused=sum(one.reused for one in played.counted),
        selected=sum(one.selected for one in played.counted),
        new=sum(one.new for one in played.counted),
    )
