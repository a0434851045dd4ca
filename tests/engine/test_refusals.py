"""Why an engine makes no passes: any worker may say so, and none can keep it from serving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from td_serve.engine.passes import RoundPasses
from td_serve.types import Canonical, MemberPass, PassSpec, RequestId, Rule, RuleName, SegmentKey

MEMBER = MemberPass(request_id=RequestId("ada"), history="", token_ids=[1], pieces=[])
SPEC = PassSpec(
    canonical=Canonical(key=SegmentKey("key"), token_ids=[], segments=[]),
    rule=Rule(name=RuleName.NONE),
    members=[MEMBER],
)


class Workers:
    """An engine whose workers answer as scripted; counts what it is asked."""

    def __init__(self, answer: Callable[[], list[Any]]) -> None:
        self.asked: list[str] = []
        self._answer = answer

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.asked.append(method)
        return self._answer()

    async def check_health(self) -> None:
        """It lives."""


def broken() -> list[Any]:
    raise RuntimeError("no attention groups")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda: ["one worker only", "one worker only"], "one worker only"),
        (lambda: [None, "a layer is elsewhere"], "a layer is elsewhere"),
        (broken, "its worker cannot tell: RuntimeError('no attention groups')"),
    ],
)
async def test_a_refusal_is_known_once_and_no_pass_is_begun(
    answer: Callable[[], list[Any]], why: str
) -> None:
    llm = Workers(answer)
    passes = RoundPasses(llm, 0.25)  # type: ignore[arg-type]
    assert await passes.why_none() == why
    assert passes.known_why == why
    assert await passes.make(SPEC, "round 0") == {}
    assert await passes.mirrors() == 0
    passes.release(MEMBER.request_id)
    assert llm.asked == ["td_why_no_passes"]
