"""What prefilling a round as one unit saves, and what it costs in fidelity, on a recorded trace.

One engine in this process. Each way plays the round before (which warms what it keeps) and then the
measured one, from the same prompts: vLLM's own prefix caching, the same with the shared text first,
and passes by each rule, together and member by member. A rule's speed is printed only after a pass
that computes everything has given the engine's own tokens.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Sequence
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
from td_serve.sim.trace import read_trace
from td_serve.types import SessionId


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`rounds` rounds of a trace from `first` on, each after the one before it.

    Prompts have `layout`, except where the shared text is put first to compare. The trace's first
    `agents` agents take part (None: all), and hear all that spoke.
    """

    trace: Path
    model: str
    presets: tuple[Preset, ...]
    agents: int | None = None
    first: int = 1
    rounds: int = 1
    layout: Layout = Layout.HISTORY_FIRST
    window: int = 8192
    dtype: str = "float32"
    speed: bool = True
    fidelity: bool = False


def bench_reuse(options: Options, say: Callable[[str], None]) -> Result:
    """Measure on an engine of our own. `say` tells the progress.

    Raises TdServeError when the trace does not fit, or a pass that computes everything disagrees
    with the engine.
    """
    from td_serve.models.resolve import resolve

    trace = read_trace(options.trace)
    prompts = Prompts(resolve(options.model), options.window, SCORED)
    span = (options.agents, options.first - 1, options.rounds + 1)
    played = prompts.rounds(trace, *span, options.layout)
    cut = prompts.cuts
    say("starting the engine")
    most = max(sum(_tokens(round_)) for round_ in played)
    room = max(3 * most, 2 * options.window)  # or the engine would not take the window
    engine = PassEngine(resolve(options.model), options.dtype, options.window, room)
    bench = _Bench(engine, SessionId(trace.name), options.presets)
    rows: list[Row] = []
    measured: dict[tuple[Preset, bool], Measured] = {}
    for before, round_ in itertools.pairwise(played):
        place = played.index(before)
        number = options.first + place
        bench.authors = Authors(
            number - 1, prompts.spoken(trace, number - 1, options.layout), options.window
        )
        say(f"round {number}: is a pass that computes everything exact?")
        answers = bench.check_exact(before, round_)
        if options.fidelity:
            say(f"round {number}: fidelity")
            bench.measure(before, round_, answers, measured)
        if options.speed:
            laid = prompts.rounds(trace, options.agents, number - 1, 2, Layout.SHARED_FIRST)
            rows += bench.race(number, before, round_, (laid[0], laid[1]), say)
    close = [fidelity(*which, found) for which, found in measured.items()]
    summary = summarise(options.presets[0], rows, close, bench.tokens)
    return Result(rows=rows, fidelity=close, summary=summary, cut=cut)


class _Bench:
    """One engine, and the ways to play a round on it."""

    def __init__(self, engine: PassEngine, sim: SessionId, presets: Sequence[Preset]) -> None:
        self._engine = engine
        self._sim = sim
        self._presets = presets
        self.authors = Authors(0, [], 0)
        """Those of the round before the measured one."""
        self.tokens: list[Tokens] = []

    def check_exact(self, before: Round, round_: Round) -> dict[str, list[int]]:
        """What the engine itself answers.

        Raises TdServeError when a pass that computes everything answers otherwise, or when there is
        none.
        """
        if not self._plan(round_, Preset.FULL, "").passes:
            raise TdServeError(
                f"trace {self._sim!r}: no two of the {len(round_)} agents have anything in common "
                "in this round: there is nothing to measure"
            )
        salt = uuid.uuid4().hex
        wanted = self._engine.play_plain(round_, salt, max_tokens=SCORED).answers
        self._warm(before, Preset.FULL, salt)
        found = self._blend(round_, Preset.FULL, salt, max_tokens=SCORED).answers
        if found != wanted:
            wrong = [agent for agent in wanted if found[agent] != wanted[agent]]
            raise TdServeError(
                f"a pass that computes everything answers otherwise than the engine, for "
                f"{', '.join(wrong)}: no speed is measured"
            )
        return wanted

    def race(
        self,
        number: int,
        before: Round,
        round_: Round,
        shared_first: tuple[Round, Round],
        say: Callable[[str], None],
    ) -> list[Row]:
        """Every way, one after the other, each after the round before."""
        rows = []
        for way, play in self._ways(before, round_, shared_first):
            self._engine.forget()
            played = play()
            rows.append(
                Row(
                    round=number,
                    way=way,
                    seconds=round(played.seconds, 3),
                    **_phases(played),
                    computed=played.computed,
                    selected=sum(one.selected for one in played.counted),
                    blended=len(played.counted),
                )
            )
            say(f"round {number}, {way}: {played.seconds:.1f} s")
        return rows

    def _ways(
        self, before: Round, round_: Round, shared_first: tuple[Round, Round]
    ) -> list[tuple[str, Callable[[], Played]]]:
        def plain(earlier: Round, now: Round) -> Callable[[], Played]:
            def play() -> Played:
                salt = uuid.uuid4().hex
                self._engine.play_plain(earlier, salt)
                return self._engine.play_plain(now, salt)

            return play

        def blended(
            preset: Preset, *, together: bool = True, is_given: bool = False
        ) -> Callable[[], Played]:
            def play() -> Played:
                salt = uuid.uuid4().hex
                self._warm(before, preset, salt)
                if is_given:
                    reuse = self._plan(round_, preset, salt)
                    self._engine.bring(reuse, self.authors)
                    self._engine.prepare(reuse)
                played = self._blend(round_, preset, salt, together=together)
                if together and not is_given and preset is self._presets[0]:
                    self.tokens.append(_counted(played))
                return played

            return play

        return [
            (VLLM, plain(before, round_)),
            (SHARED_FIRST, plain(*shared_first)),
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
        before: Round,
        round_: Round,
        answers: dict[str, list[int]],
        measured: dict[tuple[Preset, bool], Measured],
    ) -> None:
        """Add each member's divergences, agreements and match lengths to `measured`."""
        for reads_authors in (False, True):
            presets = [one for one in self._presets if one.reads_authors == reads_authors]
            if presets:
                self._score(round_, answers, presets, measured)
        for preset in self._presets:
            salt = uuid.uuid4().hex
            self._warm(before, preset, salt)
            said = self._blend(round_, preset, salt, max_tokens=SCORED).answers
            measured[preset, False].match += [
                alike(answers[agent], said[agent]) for agent in answers
            ]

    def _score(
        self,
        round_: Round,
        answers: dict[str, list[int]],
        presets: Sequence[Preset],
        measured: dict[tuple[Preset, bool], Measured],
    ) -> None:
        """Divergences and agreements of presets on one base, and of random choices."""
        reuse = self._plan(round_, presets[0], "", asking=True)
        spec = reuse.passes[0]
        self._engine.bring(reuse, self.authors)
        by_request = {str(one.request_id): agent for agent, one in round_.items()}
        # Of an answer's tokens all but the last are read.
        prompts = [
            [*round_[agent].prompt_token_ids, *answers[agent][: SCORED - 1]]
            for agent in (by_request[str(member.request_id)] for member in spec.members)
        ]
        which = [(preset, False) for preset in presets]
        which += [(preset, True) for preset in presets if preset.chooses]
        asked = [(preset.rule, at_random) for preset, at_random in which]
        for one, score in zip(which, self._engine.score(spec, prompts, asked, SCORED), strict=True):
            found = measured.setdefault(one, Measured())
            found.kl += score.kl
            found.same += score.same
            found.chosen.append(score.chosen)
            found.alone += score.alone

    def _warm(self, before: Round, preset: Preset, salt: str) -> None:
        """The round before, in the same way: it leaves histories and a header."""
        self._blend(before, preset, salt)

    def _blend(
        self,
        round_: Round,
        preset: Preset,
        salt: str,
        *,
        together: bool = True,
        max_tokens: int = 1,
    ) -> Played:
        reuse = self._plan(round_, preset, salt)
        self._engine.bring(reuse, self.authors)
        return self._engine.play_passes(round_, reuse, salt, together, max_tokens)

    def _plan(self, round_: Round, preset: Preset, salt: str, *, asking: bool = False) -> Reuse:
        """`asking`: with what is asked, for rules that go by it."""
        rule = msgspec.structs.replace(preset.rule, weighed=True) if asking else preset.rule
        turns = self.authors.turns if preset.reads_authors else None
        return plan_reuse(SessionId(f"{self._sim}-{salt}"), round_, rule, _head(round_), turns)


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
