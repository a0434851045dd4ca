"""A trace's rounds as prompts in tokens, cut into segments, as a server would see them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from td_serve.engine.heads import neutral_head
from td_serve.errors import TdServeError
from td_serve.segments import locate, mark, split, tokenise
from td_serve.sim.layouts import JOIN, Layout, Prompt, build
from td_serve.sim.tokens import ModelTokenizer
from td_serve.sim.trace import Trace
from td_serve.sim.window import cut_to_window
from td_serve.sim.workload import (
    check_outputs,
    choose_agents,
    choose_rounds,
    recorded_outputs,
    share,
    views,
)
from td_serve.types import AgentId, GenerateRequest, RequestId

Round = dict[AgentId, GenerateRequest]
"""What each agent asks in one round; its sampling parameters are left empty."""


class Spoken(NamedTuple):
    """An agent's prompt in a round, and what it put out."""

    agent: AgentId
    prompt: list[int]
    put_out: list[int]


class Prompts:
    """Makes prompts with the tokenizer and the template of a model's directory.

    They leave room for `reserved` tokens in a window of `window`; what does not fit is cut, oldest
    first (`sim.window`).
    """

    def __init__(self, model: str, window: int, reserved: int) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._counter = ModelTokenizer(Path(model))
        self._window = window
        self._reserved = reserved
        self._head = neutral_head(self._tokenizer)
        self.cuts = 0
        """How many prompts did not fit as they were."""

    def rounds(
        self, trace: Trace, agents: int | None, first: int, count: int | None, layout: Layout
    ) -> list[Round]:
        """The prompts of `count` rounds from round `first` on, with the recorded outputs: those of
        the first `agents` agents, who hear all that spoke.

        Raises ReplayError where the trace does not have them, or a prompt does not fit.
        """
        chosen = choose_agents(trace, agents)
        played = choose_rounds(trace, first, count)
        everybody = trace.header.agent_ids
        check_outputs(trace, everybody, played, live=False)
        shared = [share(one, recorded_outputs(one), everybody) for one in trace.rounds]
        made = []
        for round_ in played:
            known = shared[: round_.round]
            prompts = [build(layout, view) for view in views(trace, round_, chosen, known)]
            made.append({prompt.agent: self._request(prompt) for prompt in prompts})
        return made

    @staticmethod
    def check(trace: Trace, agents: int | None, last: int) -> None:
        """Raises TdServeError where a trace does not have round `last`, or one agent is alone."""
        if agents == 1:
            raise TdServeError("--agents: 1, expected 2 or more: one agent shares with nobody")
        if last >= len(trace.rounds):
            raise TdServeError(
                f"round {last}: trace {trace.name!r} has rounds 0 to {len(trace.rounds) - 1}"
            )

    def spoken(self, trace: Trace, number: int, layout: Layout) -> list[Spoken]:
        """What everybody put out in round `number`, if it was recorded, and what they had read."""
        (asked,) = self.rounds(trace, None, number, 1, layout)
        said = recorded_outputs(trace.rounds[number])
        return [
            Spoken(agent, request.prompt_token_ids, list(self._encode(said[agent])))
            for agent, request in asked.items()
            if agent in said
        ]

    def _request(self, prompt: Prompt) -> GenerateRequest:
        cut = cut_to_window(prompt, self._window, self._reserved, self._counter.chat)
        self.cuts += bool(cut.dropped)
        texts = [[part.text for part in message.parts] for message in cut.prompt.messages]
        glued = [split(mark(parts, JOIN)) for parts in texts]
        text = self._tokenizer.apply_chat_template(
            [
                {"role": message.role, "content": "".join(parts)}
                for message, parts in zip(cut.prompt.messages, glued, strict=True)
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        tokens, cuts = tokenise(text, locate(text, glued), self._encode)
        return GenerateRequest(
            request_id=RequestId(f"{prompt.round}-{prompt.agent}"),
            prompt_token_ids=tokens,
            sampling=b"",
            cuts=cuts,
            head=self._head,
        )

    def _encode(self, text: str) -> Sequence[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens
