"""Server-sent events, the body of a request, and the one rule about clients: who leaves stops costing at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from triptych.errors import CapacityError
from triptych.server.errors import BodyTimeoutError, PayloadTooLargeError, UnsupportedMediaTypeError

DONE = b"data: [DONE]\n\n"
SMALL_BODY = 2**20

_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event with a JSON object. It is one line, also for clients that know Unicode's ends of lines."""
    line = msgspec.json.encode(data)
    for end in ("\u0085", "\u2028", "\u2029"):
        line = line.replace(end.encode(), f"\\u{ord(end):04x}".encode())
    return b"data: " + line + b"\n\n"


class EventResponse(StreamingResponse):
    """A stream of events that is cancelled in the moment the client leaves, however long the next event takes.

    A slow reader holds `send`, and so the generator, back. `close` is awaited in every case, also when the generator
    never started.
    """

    def __init__(
        self, events: AsyncGenerator[bytes], close: Callable[[], Awaitable[None]], headers: Mapping[str, str]
    ) -> None:
        # The last one keeps a proxy (nginx) from collecting the events.
        own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers={**own, **headers})
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self.stream_response(send))
        except ClientGone:
            pass  # the outcome is recorded by `close`
        finally:
            await self._events.aclose()
            await self._close()


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`; when the client leaves first, cancels it and raises ClientGone.

    The request's body must have been read: what comes next on `receive` is the disconnect.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class BodyRoom:
    """Bounds the memory that large bodies take together, from when they are read until their media is loaded. Small
    ones do not count, so text is let in however many clips are under way."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held = 0

    @contextmanager
    def enter(self) -> Iterator[Callable[[int], None]]:
        """For one request. Yields what to call with the size of its body so far; that raises CapacityError."""
        held = 0

        def grow(size: int) -> None:
            nonlocal held
            more = size - held if size > SMALL_BODY else 0
            if self._held + more > self._most:
                raise CapacityError("too many large requests are being read; try again", status=503)
            self._held += more
            held += more

        try:
            yield grow
        finally:
            self._held -= held


async def read_json_body(request: Request, limit: int, timeout_s: float, grow: Callable[[int], None]) -> bytes:
    """The raw body, refused while it is read once it is longer than `limit` bytes or takes longer than `timeout_s`.

    `grow` is told its size so far. Raises UnsupportedMediaTypeError, PayloadTooLargeError, BodyTimeoutError, ClientGone
    or what `grow` raises.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        found = f"content type {kind!r} is not" if kind else "the request has no content type; send"
        raise UnsupportedMediaTypeError(f"{found} 'application/json'")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaTypeError(f"content encoding {encoding!r} is not supported; send the body as it is")
    parts: list[bytes] = []
    size = 0
    declared = request.headers.get("content-length", "")
    too_large = PayloadTooLargeError(f"the body is larger than the {limit} bytes that this server takes")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                grow(size)
                parts.append(part)
    except TimeoutError:
        raise BodyTimeoutError(f"the body did not arrive within {timeout_s:g} s; {size} bytes of it did") from None
    except ClientDisconnect as error:
        raise ClientGone from error
    return b"".join(parts)
