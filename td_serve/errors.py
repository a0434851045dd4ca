"""Everything td_serve raises on purpose.

TdServeError
├── ConfigError            a cluster file or an option is wrong: key path, value, what was expected
├── ModelError             a model cannot be made or used
│   └── ModelNotFetched    it is known, but not on this machine yet
├── StoreError             what a lower tier of the store has is not what was put there
│   └── TierDown               it does not answer, or takes nothing
├── TraceError             a trace file is malformed
├── ReplayError            a replay cannot go on
└── RequestError           one request cannot be served; carries the HTTP status a client sees
    ├── BadRequest             400  a field of the request is wrong
    ├── Unauthorized           401  the request has no key of a tenant
    ├── NotFound               404  what the path names is not there
    ├── RoundConflict          409  a member contradicts its round
    ├── TooLarge               413  the request's body is too large
    ├── Unavailable            503  no replica could serve it; trying again may help
    │   └── ReplicaLost             the replica that was called is gone
    └── EngineFailure          500  an engine failed in mid-request
"""

from __future__ import annotations

from http import HTTPStatus


class TdServeError(Exception):
    """Base of all errors that td_serve raises on purpose."""


class ConfigError(TdServeError):
    """A cluster file or an option is wrong. The message names the key's path."""


class ModelError(TdServeError):
    """A model cannot be made or used."""


class ModelNotFetched(ModelError):
    """The model is known, but not on this machine; the message names the command for it."""


class StoreError(TdServeError):
    """What a lower tier of the store has is not what was put there."""


class TierDown(StoreError):
    """A lower tier of the store does not answer, or takes nothing."""


class TraceError(TdServeError):
    """A trace file is malformed. The message names file, line, field, value and expectation."""


class ReplayError(TdServeError):
    """A replay cannot go on (no server, a trace that does not fit the options)."""


class RequestError(TdServeError):
    """One request cannot be served.

    `status` is the HTTP status a client sees, `field` the request's field at fault, if one is.
    """

    status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str | None]]:
        # Exceptions cross processes by pickle, which would otherwise drop `field`.
        return type(self), (self.message, self.field)


class BadRequest(RequestError):
    """A field of the request is wrong."""

    status = HTTPStatus.BAD_REQUEST


class Unauthorized(RequestError):
    """The request has no key of a tenant. The message never has what it has instead."""

    status = HTTPStatus.UNAUTHORIZED


class NotFound(RequestError):
    """What the path names is not there."""

    status = HTTPStatus.NOT_FOUND


class TooLarge(RequestError):
    """The request's body is too large."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class RoundConflict(RequestError):
    """A member contradicts its round: the same agent twice, another number of agents."""

    status = HTTPStatus.CONFLICT


class Unavailable(RequestError):
    """No replica could serve the request. Trying again may help."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


class ReplicaLost(Unavailable):
    """The replica that was called has died, or there is none."""


class EngineFailure(RequestError):
    """An engine failed in mid-request, after output had been delivered or retries were spent."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR
