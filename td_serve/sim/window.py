"""Cutting a prompt to the model's window by a stated rule. Pure.

The rule: what the output may take is reserved first. Then parts are dropped whole until the prompt
fits, oldest first:

1. what belongs to earlier rounds, a round at a time (private history and, in a transcript, that
   round's shared blocks with it);
2. the private history of the round itself;
3. the round's shared blocks, one at a time, from the first on.

Preamble, profile and task are never dropped: a prompt that does not fit without all the rest is
refused. Nothing is shortened inside, so that what remains is still found by its text. The rule
looks at one prompt alone: it may leave out a shared block for one agent that another still reads.
"""

from collections.abc import Callable, Sequence

import msgspec

from td_serve.errors import ReplayError
from td_serve.sim.layouts import Kind, Message, Part, Prompt

CountTokens = Callable[[Sequence[dict[str, str]]], int]
"""Tokens of a chat prompt, template included. Leaving out a part must not raise it."""

_DROPPABLE = (Kind.HISTORY, Kind.SHARED)


class Cut(msgspec.Struct, frozen=True):
    """A prompt that fits, and what it cost."""

    prompt: Prompt
    tokens_before: int
    tokens: int
    dropped: tuple[Part, ...]
    """In the order in which they were dropped; empty when the prompt fitted as it was."""


def cut_to_window(prompt: Prompt, window: int, reserved: int, count: CountTokens) -> Cut:
    """Drop as few steps of the rule as make the prompt fit `window - reserved` tokens.

    With a larger window never more is dropped.

    Raises:
        ReplayError: it does not fit with everything droppable dropped.
    """
    room = window - reserved
    before = count(prompt.chat())
    if before <= room:
        return Cut(prompt, before, before, ())
    steps = drop_steps(prompt)
    # The first number of steps that fits, by bisection: counting is the costly part, and dropping
    # more never makes a prompt longer.
    low, high = 0, len(steps)
    last = _without(prompt, steps[:high])
    least = count(last.chat())
    if least > room:
        raise ReplayError(
            f"the prompt of {prompt.agent!r} in round {prompt.round} has {before} tokens, and "
            f"{least} with all history and shared blocks dropped; the window of {window} leaves "
            f"{room} beside {reserved} for the output"
        )
    best, tokens = last, least
    while high - low > 1:
        middle = (low + high) // 2
        tried = _without(prompt, steps[:middle])
        tried_tokens = count(tried.chat())
        if tried_tokens <= room:
            high, best, tokens = middle, tried, tried_tokens
        else:
            low = middle
    parts = prompt.parts
    dropped = tuple(parts[index] for step in steps[:high] for index in step)
    return Cut(best, before, tokens, dropped)


def drop_steps(prompt: Prompt) -> tuple[tuple[int, ...], ...]:
    """The rule's steps for a prompt: indices into `prompt.parts` that go together, in order."""
    droppable = [(i, part) for i, part in enumerate(prompt.parts) if part.kind in _DROPPABLE]
    earlier = sorted({part.round for _, part in droppable if part.round < prompt.round})
    steps = [tuple(i for i, part in droppable if part.round == round_) for round_ in earlier]
    now = [(i, part) for i, part in droppable if part.round == prompt.round]
    history = tuple(i for i, part in now if part.kind is Kind.HISTORY)
    if history:
        steps.append(history)
    steps += [(i,) for i, part in now if part.kind is Kind.SHARED]
    return tuple(steps)


def _without(prompt: Prompt, steps: Sequence[Sequence[int]]) -> Prompt:
    """The prompt without the parts of these steps."""
    gone = {index for step in steps for index in step}
    messages: list[Message] = []
    start = 0
    for message in prompt.messages:
        kept = tuple(part for i, part in enumerate(message.parts, start) if i not in gone)
        start += len(message.parts)
        if kept:
            messages.append(Message(message.role, kept))
    return Prompt(prompt.agent, prompt.round, tuple(messages))
