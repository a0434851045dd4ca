"""What an endpoint answers: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from td_serve.errors import RequestError


@dataclass(frozen=True)
class JsonReply:
    """One JSON object, whole."""

    status: int
    body: dict[str, Any]


@dataclass(frozen=True)
class StreamReply:
    """Server-sent events, each `data: …` and two line ends, closed by `data: [DONE]`."""

    events: AsyncGenerator[str, None]


Reply = JsonReply | StreamReply


def error_reply(error: RequestError) -> JsonReply:
    """An error of ours in OpenAI's shape."""
    return error_of(error.status, error.message, error.field)


def error_of(status: HTTPStatus, message: str, field: str | None) -> JsonReply:
    """An error in OpenAI's shape."""
    return JsonReply(
        int(status),
        {
            "error": {
                "message": message,
                "type": status.phrase.title().replace(" ", "") + "Error",
                "param": field,
                "code": int(status),
            }
        },
    )
