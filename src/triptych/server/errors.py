"""Errors as HTTP: the one map from the exception tree to a status and OpenAI's error body.

{"error": {"message": str, "type": str, "param": str | null, "code": str | null}}
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from triptych.config.json_value import cut, shown
from triptych.errors import CapacityError, DeadlineError, RequestError, StageError

logger = logging.getLogger(__name__)

_WORDS = {  # of pydantic's errors, in JSON's words; its own are Python's
    "bool_type": "should be true or false",
    "dict_type": "should be an object",
    "finite_number": "should be a number, which NaN and Infinity are not",
    "float_type": "should be a number",
    "greater_than": "should be above {gt}",
    "greater_than_equal": "should be at least {ge}",
    "int_type": "should be a whole number",
    "less_than": "should be below {lt}",
    "less_than_equal": "should be at most {le}",
    "list_type": "should be an array",
    "literal_error": "should be {expected}",
    "string_too_long": "takes at most {max_length}, has {has}",
    "string_too_short": "needs at least {min_length}, has {has}",
    "string_type": "should be a string",
    "too_long": "takes at most {max_length}, has {has}",
    "too_short": "needs at least {min_length}, has {has}",
}
_ROUTING = {404: "path_not_found", 405: "method_not_allowed"}  # `code` of what no route takes
STAGE_RETRY_AFTER = 5  # seconds until a stage that is being restarted is worth another try


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    status = 401

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""

    status = 404

    def __init__(self, model: str, served: Sequence[str]) -> None:
        message = f"the model {shown(model)} does not exist here; this server has {', '.join(map(shown, served))}"
        super().__init__(message, param="model", code="model_not_found")


class BodyTimeoutError(RequestError):
    status = 408

    def __init__(self, message: str) -> None:
        super().__init__(message, code="body_timeout")


class PayloadTooLargeError(RequestError):
    status = 413

    def __init__(self, message: str) -> None:
        super().__init__(message, code="payload_too_large")


class UnsupportedMediaTypeError(RequestError):
    status = 415

    def __init__(self, message: str) -> None:
        super().__init__(message, code="unsupported_media_type")


def status_of(error: Exception) -> int:
    """The HTTP status of an error; 500 for one that is not in the tree."""
    if isinstance(error, RequestError | CapacityError | StageError):
        return error.status
    if isinstance(error, DeadlineError):
        return 504
    return error.status_code if isinstance(error, HTTPException) else 500


def error_body(error: Exception) -> dict[str, Any]:
    """OpenAI's error body. What an unforeseen error says stays in the log."""
    message, kind, param, code = "the server failed on this request; its log says why", "server_error", None, None
    match error:
        case RequestError():
            message, kind, param, code = str(error), "invalid_request_error", error.param, error.code
        case CapacityError():
            message, kind, code = str(error), "rate_limit_error", "rate_limit_exceeded"
            if error.status == 503:
                kind, code = "service_unavailable", "no_capacity"
        case StageError():
            suffix = f" (request {error.request_id})" if error.request_id else ""
            message, kind, code = f"{_named(error)}{suffix}", "server_error", "stage_failed"
            if error.status == 503:
                kind, code = "service_unavailable", "stage_unavailable"
        case DeadlineError():
            message, kind, code = _named(error), "timeout", "deadline_exceeded"
        case HTTPException():
            message, kind, code = str(error.detail), "invalid_request_error", _ROUTING.get(error.status_code)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception) -> JSONResponse:
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, CapacityError):
        headers["Retry-After"] = str(error.retry_after)
    elif isinstance(error, StageError) and error.status == 503:
        headers["Retry-After"] = str(STAGE_RETRY_AFTER)
    elif isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, BodyTimeoutError):
        headers["Connection"] = "close"  # what still comes of the body is no request
    return JSONResponse(error_body(error), status_of(error), headers)


def invalid_request(error: ValidationError) -> RequestError:
    """The first thing wrong with a request body, as an error with the dotted path of the field."""
    first = error.errors(include_url=False)[0]
    # Tags of our unions are in parentheses: no part of what the client wrote.
    path = [str(part) for part in first["loc"] if not str(part).startswith("(")]
    value = first["input"]
    if "key" in first.get("ctx", {}):  # an error of ours that is about one of the input's values
        value = value[first["ctx"]["key"]]
        path.append(cut(first["ctx"]["key"]))
    param, kind, message = ".".join(path), first["type"], _worded(first)
    if kind == "unknown":
        return RequestError(f"unknown field {param!r}", param, "unknown_parameter")
    if kind == "missing":
        return RequestError(f"field {param!r} is required", param, "missing_required_parameter")
    if kind == "unsupported":
        return RequestError(f"{param!r} is not supported: {message}", param, "unsupported_parameter")
    return RequestError(f"{param!r}: {message}; got {shown(value)}", param, "invalid_value")


def _worded(error: ErrorDetails) -> str:
    """What is wrong with a value."""
    context = error.get("ctx", {})
    values = {name: int(of) if isinstance(of, float) and of.is_integer() else of for name, of in context.items()}
    for bound in ("min_length", "max_length"):
        if bound in values:
            count, what = values[bound], "character" if error["type"].startswith("string") else "item"
            values |= {bound: f"{count} {what}" if count == 1 else f"{count} {what}s", "has": len(error["input"])}
    if "expected" in values:
        values["expected"] = str(values["expected"]).replace("'", '"')
    if error["type"] == "float_type" and type(error["input"]) is int:
        return "should be a smaller number"  # no float holds it
    return _WORDS[error["type"]].format(**values) if error["type"] in _WORDS else error["msg"]


def install(app: FastAPI) -> None:
    """Answer every error, of ours or of the framework, in OpenAI's shape. To be called when `app` has its routes."""
    served = ", ".join(
        f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods
    )

    async def known(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, StageError | DeadlineError):
            logger.warning("%s %s failed: %s", request.method, request.url.path, error)
        return error_response(error)

    async def not_routed(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and error.status_code in _ROUTING:
            message = f"{request.method} {cut(request.url.path)}: {error.detail}; this server has {served}"
            error = HTTPException(error.status_code, message, error.headers)
        return error_response(error)

    for kind in (RequestError, CapacityError, StageError, DeadlineError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, not_routed)
    app.add_exception_handler(Exception, known)  # the framework logs it with its traceback


def _named(error: StageError | DeadlineError) -> str:
    """The error with the name of its stage, which most of them give themselves."""
    stage, message = f"stage {error.stage}", str(error)
    return message if stage in message else f"{stage}: {message}"
