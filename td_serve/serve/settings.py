"""Settings that change while a deployment runs (`user_config`)."""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec

from td_serve.config import decode
from td_serve.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

log = logging.getLogger(__name__)


def changed(user_config: object, kind: type[T], place: str, is_running: bool) -> T | None:
    """What a deployment shall go by from now on; None where that is no good and one that is running
    goes on by what it has: Serve would end it, and with it what it knows.

    Raises ConfigError where nothing is running yet.
    """
    try:
        return decode(user_config, kind, path=place)
    except ConfigError as error:
        if not is_running:
            raise
        log.error("%s: nothing is changed, the settings before are in force", error)
        return None
