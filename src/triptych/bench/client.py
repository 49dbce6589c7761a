"""A streaming client of `POST /v1/chat/completions`, of any server that speaks OpenAI's shape.

It reads bytes and JSON itself: what the official client spends on parsing is no time of the server's. Text is
`delta.content` or `delta.audio.transcript`, audio is `delta.audio.data`. vLLM-Omni's own shape is read too: an object
with `modality: "audio"` carries a whole WAV file, as base64, in `delta.content`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from triptych.bench.outcome import Outcome

DONE = b"[DONE]"
MOST_EVENT_BYTES = 64 * 2**20
MOST_ERROR_BYTES = 64 * 2**10
MOST_DETAIL = 300  # characters


class _Failure(Exception):
    """Why a request failed; never leaves this module."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


class Client:
    """Asks one URL. `timeout_s` bounds a whole request. Proxies of the environment are not used: they would be
    measured too. `transport` takes the place of the network."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "Accept-Encoding": "identity"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._url = url
        self._timeout_s = timeout_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            headers=headers, timeout=None, limits=limits, trust_env=False, transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def ask(self, body: bytes, *, speaks: bool) -> Outcome:
        """Send one request and follow its reply to the end. What goes wrong is in the outcome: nothing is raised.

        `speaks`: audio was asked for, so audio that is all silence is a failure.
        """
        outcome = Outcome(started_at=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._follow(body, outcome)
            if speaks and outcome.has_audio and outcome.audio.silent:
                raise _Failure("silent audio", f"{outcome.playout.audio_s:.2f} s, rms {outcome.audio.rms:.1e}")
        except _Failure as failure:
            outcome.failure, outcome.detail = failure.reason, failure.detail
        except TimeoutError:
            outcome.failure = f"timeout after {self._timeout_s:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            outcome.failure, outcome.detail = f"connection: {type(error).__name__}", str(error)[:MOST_DETAIL]
        outcome.ended_at = time.perf_counter()
        return outcome

    async def _follow(self, body: bytes, outcome: Outcome) -> None:
        async with self._http.stream("POST", self._url, content=body) as response:
            if response.status_code != 200:
                raise _Failure(f"http {response.status_code}", await _said(response))
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise _Failure("not a stream", f"content type {kind!r}")
            async for data, at in _events(response):
                if data == DONE:
                    return
                try:
                    _take(msgspec.json.decode(data), outcome, at)
                except (msgspec.DecodeError, binascii.Error, ValueError, TypeError, AttributeError) as error:
                    raise _Failure("malformed event", str(error)[:MOST_DETAIL]) from error
        raise _Failure("cut off", "the stream ended before data: [DONE]")


async def _events(response: httpx.Response) -> AsyncIterator[tuple[bytes, float]]:
    """The data of each server-sent event, and when its last byte arrived."""
    held = bytearray()
    async for piece in response.aiter_raw():
        at = time.perf_counter()
        *lines, rest = piece.split(b"\n")
        for line in lines:
            held += line
            if held.startswith(b"data:"):
                yield bytes(held[5:]).strip(), at
            held.clear()
        held += rest
        if len(held) > MOST_EVENT_BYTES:
            raise _Failure("malformed event", f"more than {MOST_EVENT_BYTES} bytes")


async def _said(response: httpx.Response) -> str:
    """What the body of an error says, cut to a length fit for a report."""
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MOST_ERROR_BYTES:
            break
    try:
        return _message(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace")[:MOST_DETAIL]


def _message(value: Any) -> str:
    error = value.get("error", value) if isinstance(value, dict) else value
    return str(error.get("message", error) if isinstance(error, dict) else error)[:MOST_DETAIL]


def _take(chunk: dict[str, Any], outcome: Outcome, at: float) -> None:
    """Enter one object of the stream. Raises _Failure for an error, and whatever a wrong shape raises."""
    if chunk.get("error") or chunk.get("object") == "error":
        raise _Failure("error event", _message(chunk))
    outcome.usage = chunk.get("usage") or outcome.usage
    outcome.fingerprint = chunk.get("system_fingerprint") or outcome.fingerprint
    text = ""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        audio, content = delta.get("audio") or {}, delta.get("content") or ""
        data = audio.get("data")
        if chunk.get("modality") == "audio":
            data, content = data or content, ""
        if data:
            outcome.playout.arrive(at, outcome.audio.feed(base64.b64decode(data, validate=True)))
        text += content or audio.get("transcript") or ""
        outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
    if text:
        outcome.text_times.append(at)
        outcome.text.append(text)
