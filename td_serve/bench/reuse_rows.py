"""What the reuse bench has measured: a row for each way in each round, and the first preset against
the other ways."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from td_serve.bench.fidelity import Fidelity
from td_serve.bench.presets import Preset


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way in one round: seconds until all first tokens, by phase, how many tokens were computed
    to the end (a check layer's are not), of which only because a rule has chosen them, and how many
    members were in passes.

    A pass computes the canonical sequence, a rule's check layer and the members' rows; then their
    KV is restored into requests' pages, and the suffix is what the engine itself computes.
    """

    round: int
    way: str
    seconds: float
    canonical_s: float = 0.0
    choice_s: float = 0.0
    rows_s: float = 0.0
    restore_s: float = 0.0
    suffix_s: float
    computed: int
    selected: int = 0
    blended: int = 0


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Of the first preset's members, all rounds: prompt = local + reused + selected + new."""

    prompt: int
    local: int
    reused: int
    selected: int
    new: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The first preset, against the other ways; None where it was not measured.

    `ahead` is where what is shared was computed before the round came: in a pause after the last.
    """

    preset: Preset
    speedup_vs_vllm: float | None = None
    speedup_vs_vllm_ahead: float | None = None
    speedup_vs_serial: float | None = None
    speedup_vs_serial_paper: float | None = None
    speedup_vs_shared_first: float | None = None
    over_floor: float | None = None
    kl0_mean: float | None = None
    kl0_max: float | None = None
    kl32_mean: float | None = None
    top1_32: float | None = None
    tokens: Tokens | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured. `cut` prompts did not fit the window as they were."""

    rows: list[Row]
    fidelity: list[Fidelity]
    summary: Summary
    cut: int


VLLM, SHARED_FIRST = "vllm", "shared_first"


def serial(preset: Preset) -> str:
    """The name of the way that plays a preset member by member."""
    return f"serial {preset.value}"


def ahead(preset: Preset) -> str:
    """The name of the way that plays a preset when what is shared has been prepared."""
    return f"{preset.value} ahead"


def summarise(
    preset: Preset,
    rows: Sequence[Row],
    found: Sequence[Fidelity],
    tokens: Sequence[Tokens],
) -> Summary:
    """The first preset against the other ways: sums over all rounds."""
    seconds: dict[str, float] = {}
    computed: dict[str, int] = {}
    selected = sum(row.selected for row in rows if row.way == preset.value)
    for row in rows:
        seconds[row.way] = seconds.get(row.way, 0.0) + row.seconds
        computed[row.way] = computed.get(row.way, 0) + row.computed
    close = next((one for one in found if one.preset is preset and not one.at_random), None)

    def against(way: str, ours: str = preset.value) -> float | None:
        both = way in seconds and ours in seconds
        return round(seconds[way] / seconds[ours], 3) if both else None

    over_floor = None
    if preset.value in seconds:
        # What is new by any way, at the rate of the engine's own prefill.
        floor = (computed[preset.value] - selected) * seconds[VLLM] / computed[VLLM]
        over_floor = round(seconds[preset.value] / floor, 3)
    return Summary(
        preset=preset,
        speedup_vs_vllm=against(VLLM),
        speedup_vs_vllm_ahead=against(VLLM, ahead(preset)),
        speedup_vs_serial=against(serial(preset)),
        speedup_vs_serial_paper=against(serial(Preset.PAPER)),
        speedup_vs_shared_first=against(SHARED_FIRST),
        over_floor=over_floor,
        kl0_mean=None if close is None else close.kl0_mean,
        kl0_max=None if close is None else close.kl0_max,
        kl32_mean=None if close is None else close.kl32_mean,
        top1_32=None if close is None else close.top1_32,
        tokens=_sum(tokens),
    )


def _sum(tokens: Sequence[Tokens]) -> Tokens | None:
    if not tokens:
        return None
    fields = [field.name for field in msgspec.structs.fields(Tokens)]
    return Tokens(**{name: sum(getattr(one, name) for one in tokens) for name in fields})
