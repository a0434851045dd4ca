"""Counting tokens before a prompt is sent: by the model's tokenizer, or by a stated estimate.

The tokenizer is read from a model directory (`tokenizer.json` and the chat template) with the
`tokenizers` and `jinja2` packages, which the engine brings along: neither is imported before a
directory is given.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec

from td_serve.errors import ReplayError

Chat = Sequence[dict[str, str]]

_TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"

# Set on eight public traces, English and Chinese, with SmolLM2's tokenizer (English, digits split
# singly), so that no output, task or history of theirs has more tokens than estimated. English
# prose comes out about 1.6 times too long.
_LETTERS_PER_TOKEN = 3
_TOKENS_PER_OTHER_BYTE = 0.8
_MESSAGE_TOKENS = 8  # role and delimiters, as in ChatML
_PIECE = re.compile(
    r"(?P<word>[A-Za-z]+)"
    r"|(?P<single> +(?![A-Za-z ])|[\x00-\x1f!-@\[-`{-\x7f])"
    r"|(?P<other>[^\x00-\x7f]+)"
)


class Counter(Protocol):
    """Counts tokens. Stateless: the same text always counts the same."""

    name: str
    """Said in the report: how the numbers came about."""
    exact: bool
    """Whether the served model would count the same."""

    def text(self, text: str) -> int:
        """Tokens of a text by itself, without special tokens."""

    def chat(self, messages: Chat) -> int:
        """Tokens of a prompt, with the chat template up to where the answer begins."""


class Estimate:
    """A conservative estimate, for when no tokenizer is at hand.

    A run of Latin letters counts a token for every 3 letters begun; a digit, a punctuation mark, a
    line break and a space before one of these count 1; other scripts count 0.8 a UTF-8 byte (2.4 a
    Chinese character); each message counts 8 more.
    """

    name = "estimate (Latin letters / 3, other signs 1, other scripts 0.8 a byte)"
    exact = False

    def text(self, text: str) -> int:
        tokens = 0.0
        for match in _PIECE.finditer(text):
            piece = match.group()
            if match.lastgroup == "word":
                tokens += math.ceil(len(piece) / _LETTERS_PER_TOKEN)
            elif match.lastgroup == "single":
                tokens += 1
            else:
                tokens += _TOKENS_PER_OTHER_BYTE * len(piece.encode("utf-8", "surrogatepass"))
        return math.ceil(tokens)

    def chat(self, messages: Chat) -> int:
        bodies = sum(self.text(message["content"]) for message in messages)
        return bodies + _MESSAGE_TOKENS * (len(messages) + 1)


class ModelTokenizer:
    """The tokenizer and chat template of a model directory."""

    exact = True

    def __init__(self, directory: Path) -> None:
        """Read both.

        Raises:
            ReplayError: a file is missing or unusable, or the model has no chat template.
        """
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ReplayError(
                f"a tokenizer directory needs the packages tokenizers and jinja2: {error}"
            ) from error
        self.name = f"tokenizer of {directory}"
        path = directory / _TOKENIZER
        try:
            # Read here, so that a missing file is an OSError; the library raises a bare Exception.
            tokenizer: Any = Tokenizer.from_str(path.read_text("utf-8"))
        except Exception as error:
            raise ReplayError(f"{path}: not a tokenizer: {error}") from error
        self._tokenizer = tokenizer
        config = _json_object(directory / _CONFIG)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(_chat_template(directory, config))
        self._special = {
            name: _token(value) for name, value in config.items() if name.endswith("_token")
        }

    def text(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def chat(self, messages: Chat) -> int:
        rendered = self._template.render(
            **self._special, messages=list(messages), add_generation_prompt=True, tools=None
        )
        return self.text(rendered)


def load_counter(directory: Path | None, served_root: str | None) -> Counter:
    """The named tokenizer; else that of the served model if its files can be read here; else the
    estimate.

    Raises:
        ReplayError: `directory` was named and cannot be used.
    """
    if directory is not None:
        return ModelTokenizer(directory)
    if served_root is not None and (Path(served_root) / _TOKENIZER).is_file():
        return ModelTokenizer(Path(served_root))
    return Estimate()


def _refuse(message: str) -> NoReturn:
    """What templates call when they do not know what to do."""
    raise ReplayError(f"the chat template refuses the prompt: {message}")


def _json_object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ReplayError(f"{path}: not a tokenizer configuration: {error}") from error


def _chat_template(directory: Path, config: dict[str, Any]) -> str:
    path = directory / _TEMPLATE
    if path.is_file():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if not isinstance(template, str):
        raise ReplayError(f"{directory}: neither {_TEMPLATE} nor a chat_template in {_CONFIG}")
    return template


def _token(value: object) -> str:
    """A special token's text: files hold it as such or inside an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
