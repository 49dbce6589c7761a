"""The API key: one bearer token for every route but `/health`, `/ready` and `/metrics`, which stay open."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable

from fastapi import Request

from triptych.server.errors import AuthenticationError


def require_key(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    """A dependency that raises AuthenticationError unless the request carries `Authorization: Bearer <api_key>`.

    None lets everyone in. White space around a key is not a part of it: HTTP would not carry it.
    """
    expected = None if api_key is None else os.fsencode(api_key).strip()  # as it came from a command line

    async def check(request: Request) -> None:
        if expected is None:
            return
        header = request.headers.get("authorization", "").encode("latin-1")  # the bytes that were sent
        scheme, _, token = header.partition(b" ")
        if scheme.lower() != b"bearer" or not token.strip():
            raise AuthenticationError("no API key; send the header 'Authorization: Bearer <key>'")
        # Compared in constant time, so that the answer's timing says nothing about the key.
        if not secrets.compare_digest(token.strip(), expected):
            raise AuthenticationError("the API key is wrong")

    return check
