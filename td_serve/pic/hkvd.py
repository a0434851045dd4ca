"""What deviates most is computed anew (CacheBlend, arXiv 2405.16444; TokenDance, section 4.2).

One check layer is computed for all shared tokens, and its keys compared with the canonical ones.
Which tokens deviate there tells which do so everywhere, if the layer is not too early: at layer 1
the choice is hardly better than a random one, after a fifth of the depth it is (SmolLM2-135M, the
traces of the reuse bench, which prints both).

Of tokens that deviate as much those matter more that what is asked attends to: to go by both halves
what must be computed on the harder texts. What is left is counted without it.

How much deviation is left unmended tells how far answers will be from exact ones, better than any
fixed share of the tokens: some texts need a tenth of it, others half. Where a member's own text
stands between the shared ones (a transcript), it is computed with what is left in view, and carries
it on: it counts as if it deviated as much. Without that, answers on a village of three that talk
for hours were .023 nats from exact ones, over 32 tokens; with it they are as near as elsewhere.
"""

from __future__ import annotations

from td_serve.pic.base import Settled, Shared, mask


class HighestDeviation:
    """Those that deviate most, or matter most where that is known, in runs of `run` tokens: as many
    as it takes until the others deviate by `left` or less, averaged over all that are not known
    yet, and by the less, the more of members' own text is computed behind them. Where that is more
    than a share `ratio` of all, nothing is chosen. Without such a goal (`left` 0) it is that share.

    `first` is a rule whose choice comes first and counts, even where it is more than that.
    """

    def __init__(
        self, *, ratio: float, left: float, depth: float, run: int, first: Settled | None
    ) -> None:
        self._ratio = ratio
        self._left = left
        self._depth = depth
        self._run = run
        self._first = first

    def check_layer(self, layers: int) -> int | None:
        # Layer 0 sees a token and nothing else: there is no deviation.
        return min(max(1, round(self._depth * layers)), layers - 1)

    def chosen(self, shared: Shared) -> list[bool] | None:
        places = shared.places()
        goal = self._left * len(places) ** 2 / max(1.0, len(places) + shared.behind)
        is_too_much = False
        made = mask(shared, ()) if self._first is None else self._first.chosen(shared)
        # What is too much is so of all that is shared; a share without a goal, of what is new.
        total = len(places) + (shared.known if goal > 0 else 0)
        budget = round(self._ratio * total) - sum(made)
        left = sum(shared.deviations[place] for place in places if not made[place])
        runs = [places[start : start + self._run] for start in range(0, len(places), self._run)]

        scores = shared.scores or shared.deviations

        def score(number: int) -> float:
            return sum(scores[place] for place in runs[number]) / len(runs[number])

        # Of equals the earlier one, on every rank alike.
        for number in sorted(range(len(runs)), key=lambda number: (-score(number), number)):
            if left <= goal:
                break
            more = [place for place in runs[number] if not made[place]]
            if len(more) > budget:
                is_too_much = goal > 0
                continue
            budget -= len(more)
            left -= sum(shared.deviations[place] for place in more)
            for place in more:
                made[place] = True
        return None if is_too_much and left > goal else made
