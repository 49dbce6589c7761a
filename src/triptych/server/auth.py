"""The API key: one bearer token for every route but `/health`, `/ready` and `/metrics`, which stay open."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

from fastapi import Request

from triptych.server.errors import AuthenticationError


def require_key(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    """A dependency that raises AuthenticationError unless the request carries `Authorization: Bearer <api_key>`.

    None lets everyone in.
    """

    async def check(request: Request) -> None:
        if api_key is None:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise AuthenticationError("no API key; send the header 'Authorization: Bearer <key>'")
        # Compared as bytes in constant time, so that the answer's timing says nothing about the key.
        if not secrets.compare_digest(token.strip().encode(), api_key.encode()):
            raise AuthenticationError("the API key is wrong")

    return check
