"""The events of one request, as its consumer takes them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from types import TracebackType

from triptych.pipeline.request import AudioDelta, Done, Event, TextDelta


class RequestStream:
    """An async iterator of TextDelta, AudioDelta and, last, one Done. A failure is raised, after what came before it.

    Leaving early aborts the request in all its stages: `break` or an exception in `async for`, cancellation of the
    task, the end of `async with`, or `aclose()`.

    Memory is bounded whatever the consumer does: a chunk of audio is sent by its stage only after `on_taken` granted
    it, and text that waits behind text is merged, so no more than a chunk's worth of entries wait between two takes.
    """

    def __init__(self, request_id: str, *, on_taken: Callable[[], None], on_left: Callable[[], None]) -> None:
        self.request_id = request_id
        self._on_taken = on_taken
        self._on_left = on_left
        self._events: deque[AudioDelta | Done | list[TextDelta]] = deque()
        self._error: Exception | None = None
        self._ended = False  # nothing more will be pushed
        self._wakeup = asyncio.Event()

    # --- the orchestrator's side ---

    def push(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            if self._events and isinstance(self._events[-1], list):
                self._events[-1].append(event)
            else:
                self._events.append([event])
        else:
            self._events.append(event)
        self._ended = isinstance(event, Done)
        self._wakeup.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._ended = True
        self._wakeup.set()

    def cut(self, event: Done) -> None:
        """End at once: `event` is the next thing the consumer sees, in place of what waits."""
        self._events.clear()
        self.push(event)

    # --- the consumer's side ---

    def __aiter__(self) -> AsyncGenerator[Event]:
        return self._iterate()

    async def __anext__(self) -> Event:
        try:
            event = await self._next()
        except BaseException:
            await self.aclose()
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        """Abort the request unless it has ended. Idempotent."""
        if not self._ended:
            self._ended = True
            self._on_left()
        self._events.clear()
        self._error = None
        self._wakeup.set()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _iterate(self) -> AsyncGenerator[Event]:
        try:
            while (event := await self._next()) is not None:
                yield event
        finally:
            await self.aclose()

    async def _next(self) -> Event | None:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._wakeup.clear()
            await self._wakeup.wait()
        event = self._events.popleft()
        if isinstance(event, list):
            return _merge(event)
        if isinstance(event, AudioDelta) and not event.final:
            self._on_taken()
        return event


def _merge(deltas: list[TextDelta]) -> TextDelta:
    if len(deltas) == 1:
        return deltas[0]
    return TextDelta(
        text="".join(delta.text for delta in deltas),
        num_tokens=sum(delta.num_tokens for delta in deltas),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=deltas[-1].finish_reason,
    )
