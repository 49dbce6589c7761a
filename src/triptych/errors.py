"""The one exception tree.

TriptychError
├── ConfigError            a deploy file, flag or override is wrong (carries the dotted path)
│   └── UnknownNameError   a name that nobody knows, with those that are known
├── CheckpointError        a checkpoint is missing, truncated or does not fit its config
├── RequestError           the client's request is wrong -> HTTP 400 (carries the field)
│   └── ContextLengthError a prompt or its answer does not fit a stage's context
├── CapacityError          no room right now -> HTTP 429 or 503 with Retry-After
├── StageError             a stage failed or died -> HTTP 500 or 503 (carries stage and request id)
├── DeadlineError          a request outlived its deadline -> HTTP 504 (carries the stage it waited for)
└── ConnectorError         a handoff between stages went wrong
    ├── SequenceGap        a handoff is missing or came twice
    └── ConnectorClosed    the peer or the connector is gone
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TriptychError(Exception):
    """Root of every error that Triptych raises on purpose."""


class ConfigError(TriptychError):
    """A deploy file, CLI flag or override is wrong. `path` is dotted, e.g. `stages[1].max_num_seqs`; `reason` is the
    message without it."""

    def __init__(self, message: str, path: str | None = None) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.reason = message
        self.path = path


class UnknownNameError(ConfigError):
    """A key, flag or parameter that nobody knows: the message has the closest one that exists, and all of them."""

    def __init__(self, name: str, allowed: Iterable[str], path: str | None = None) -> None:
        names, short = sorted(allowed), f"{name:.80}"
        close = difflib.get_close_matches(short, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        super().__init__(f"unknown key {short!r}; {hint}Allowed: {', '.join(names)}", path)


class CheckpointError(TriptychError):
    """A checkpoint cannot be read, or does not hold what its config promises."""


class RequestError(TriptychError):
    """The request is wrong; `param` names the offending field as the client wrote it, and `code` what is wrong with it:
    its value, where nothing else is said."""

    status = 400

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or ("invalid_value" if param else None)


class ContextLengthError(RequestError):
    """The prompt, or the prompt and the answer asked for, do not fit a stage's context."""

    def __init__(self, message: str, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class CapacityError(TriptychError):
    """No room right now: try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1, status: int = 429) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.status = status


class StageError(TriptychError):
    """A stage failed. `status` is 503 when the stage is down (and restarting), 500 when this request broke it."""

    def __init__(self, message: str, stage: str, request_id: str | None = None, status: int = 500) -> None:
        super().__init__(message)
        self.stage = stage
        self.request_id = request_id
        self.status = status


class DeadlineError(TriptychError):
    """A request outlived its deadline while waiting for `stage`."""

    def __init__(self, message: str, stage: str) -> None:
        super().__init__(message)
        self.stage = stage


class ConnectorError(TriptychError):
    """A handoff between two stages went wrong."""


class SequenceGap(ConnectorError):
    """A handoff is missing or arrived twice."""


class ConnectorClosed(ConnectorError):
    """The connector, or its peer, is gone."""
