"""`POST /v1/chat/completions`: from the request's bytes to one choice, whole or streamed.

Everything that can be wrong with a request is found before a stage hears of it. A failure before the first event is an
HTTP error; one after it is an error event that ends the stream without `[DONE]` and without a finish reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from fastapi import Request
from fastapi.responses import Response

from triptych.config.schema import DeployConfig
from triptych.connectors.wire import TokenLogprob
from triptych.errors import CapacityError, RequestError, StageError, TriptychError
from triptych.models.qwen3_omni.config import OmniConfig
from triptych.models.qwen3_omni.processor import Processor
from triptych.pipeline.health import PipelineHealth
from triptych.pipeline.prepare import prepare
from triptych.pipeline.request import AudioDelta, Done, Event, GenerationRequest, TextDelta
from triptych.server import sse
from triptych.server.audio import FORMATS, Encoder, encodable, make_encoder
from triptych.server.completion import Completion, base64_text, logprobs_object
from triptych.server.errors import ModelNotFoundError, error_body
from triptych.server.metrics import Metrics, RequestClock
from triptych.server.protocol import ChatCompletionRequest, parse_chat_request

logger = logging.getLogger(__name__)


class EventStream(Protocol):
    """One request's events, the last of them Done. A failure is raised after what came before it."""

    async def __anext__(self) -> Event: ...

    async def aclose(self) -> None:
        """Abort the request in all its stages unless it has ended. Idempotent."""


class Orchestrator(Protocol):
    """What the server needs of the pipeline."""

    def submit(self, request: GenerationRequest) -> EventStream:
        """Raises RequestError when the request cannot be served, CapacityError when it cannot be served now."""

    def health(self) -> PipelineHealth: ...


class Events:
    """The events of one request on their way to its client, under its clock."""

    def __init__(self, stream: EventStream, clock: RequestClock) -> None:
        self._stream = stream
        self._clock = clock

    async def next(self) -> Event:
        """The next event; after Done there is none. Raises what the pipeline raises."""
        try:
            event = await self._stream.__anext__()
        except StopAsyncIteration:
            raise StageError("the pipeline ended the request without a result", "pipeline") from None
        if isinstance(event, Done) and event.finish_reason == "abort":
            raise CapacityError("the request was cancelled on the server", status=503)
        self._clock.saw(event)
        return event

    async def aclose(self, error: BaseException | None = None) -> None:
        """Let go of the request: aborts it where it has not ended. `error` is why, None when its client left."""
        await self._stream.aclose()
        self._clock.end(error)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request that the pipeline has taken."""

    request: ChatCompletionRequest
    completion: Completion
    events: Events
    encoder: Encoder | None  # None when no audio is asked for
    has_logprobs: bool


class Chat:
    """The endpoint. `model_names` are the names a request may give, `max_body_bytes` the longest body."""

    def __init__(
        self,
        *,
        orchestrator: Orchestrator,
        processor: Processor,
        config: OmniConfig,
        deploy: DeployConfig,
        metrics: Metrics,
        model_names: Sequence[str],
        max_body_bytes: int,
    ) -> None:
        self._orchestrator = orchestrator
        self._processor = processor
        self._config = config
        self._deploy = deploy
        self._metrics = metrics
        self._model_names = model_names
        self._max_body_bytes = max_body_bytes

    async def complete(self, http: Request) -> Response:
        """Answer one HTTP request. Raises TriptychError, or ClientGone when the client has left."""
        clock = RequestClock(self._metrics)
        try:
            call = await self._submit(http, clock)
        except BaseException as error:
            clock.end(error)
            raise
        headers = {"X-Request-Id": call.completion.id}
        try:
            if not call.request.stream:
                answer = await sse.until_disconnect(http.receive, self._whole(call))
                return Response(msgspec.json.encode(answer), media_type="application/json", headers=headers)
            # Headers wait for the first event, so that a request which fails before it gets an honest status.
            first = await sse.until_disconnect(http.receive, call.events.next())
        except BaseException as error:
            await call.events.aclose(error)
            raise
        return sse.EventResponse(self._stream(call, first), call.events.aclose, headers)

    async def _submit(self, http: Request, clock: RequestClock) -> Call:
        body = await sse.read_json_body(http, self._max_body_bytes, self._deploy.request_timeout_s)
        request = await asyncio.to_thread(self._read, body)
        completion = Completion(model=request.model, audio_lifetime_s=self._deploy.audio_id_lifetime_s)
        try:
            generation = await asyncio.to_thread(self._prepare, request, completion.id)
            encoder = self._encoder(request)
            stream = self._orchestrator.submit(generation)
        except RequestError as error:
            error.param = request.written(error.param)
            raise
        return Call(
            request=request,
            completion=completion,
            events=Events(stream, clock),
            encoder=encoder,
            has_logprobs=generation.thinker.logprobs is not None,
        )

    def _read(self, body: bytes) -> ChatCompletionRequest:
        request = parse_chat_request(body)
        if request.model not in self._model_names:
            raise ModelNotFoundError(request.model, self._model_names)
        if request.wants_audio and not encodable(request.audio_format):
            able = ", ".join(name for name in FORMATS if encodable(name))
            raise RequestError(
                f"this build cannot encode {request.audio_format!r}; it can encode {able}", "audio.format"
            )
        return request

    def _encoder(self, request: ChatCompletionRequest) -> Encoder | None:
        if not request.wants_audio:
            return None
        return make_encoder(request.audio_format, streaming=bool(request.stream), sample_rate=self._config.sample_rate)

    def _prepare(self, request: ChatCompletionRequest, request_id: str) -> GenerationRequest:
        thinker, talker = request.overrides()
        return prepare(
            processor=self._processor,
            config=self._config,
            deploy=self._deploy,
            messages=[message.for_template() for message in request.messages],
            speak=request.wants_audio,
            thinker=thinker,
            talker=talker,
            voice=request.speaker_name,
            seed=request.seed,
            request_id=request_id,
        )

    async def _whole(self, call: Call) -> dict[str, Any]:
        texts: list[str] = []
        logprobs: list[TokenLogprob] = []
        audio: list[bytes] = []
        while not isinstance(event := await call.events.next(), Done):
            if isinstance(event, TextDelta):
                texts.append(event.text)
                logprobs += event.logprobs
            elif call.encoder is not None:
                audio.append(await _encode(call.encoder, event))
        text = "".join(texts)
        message: dict[str, Any] = {"content": text if call.request.wants_text else None}
        if call.encoder is not None:
            audio.append(await _finish(call.encoder))
            message["audio"] = {
                "id": call.completion.audio_id,
                "data": base64_text(b"".join(audio)),
                "expires_at": call.completion.expires_at,
                "transcript": text,
            }
        return call.completion.whole(
            message, event, logprobs_object(logprobs, self._processor) if call.has_logprobs else None
        )

    async def _stream(self, call: Call, first: Event) -> AsyncGenerator[bytes]:
        """All server-sent events of an answer. `first` was taken already, to know that the request has begun."""
        try:
            async for chunk in self._chunks(call, first):
                yield sse.event({"usage": None} | chunk if call.request.includes_usage else chunk)
        except Exception as error:
            if not isinstance(error, TriptychError):
                logger.exception("request %s failed while it was streamed", call.completion.id)
            await call.events.aclose(error)
            yield sse.event(error_body(error))
            return
        yield sse.DONE

    async def _chunks(self, call: Call, first: Event) -> AsyncGenerator[dict[str, Any]]:
        """The role; text and audio as they come; `expires_at` alone; the finish reason alone; usage when asked for."""
        request, completion = call.request, call.completion
        audio_id = {"id": completion.audio_id}  # goes with the first audio update, and only there

        def audio(**fields: str) -> dict[str, Any]:
            update = audio_id | fields
            audio_id.clear()
            return {"audio": update}

        yield completion.chunk({"role": "assistant", "content": "" if request.wants_text else None})
        event = first
        while not isinstance(event, Done):
            if isinstance(event, TextDelta):
                delta: dict[str, Any] = {}
                if event.text and request.wants_text:
                    delta["content"] = event.text
                if event.text and call.encoder is not None:
                    delta |= audio(transcript=event.text)
                has_logprobs = call.has_logprobs and event.logprobs
                if delta or has_logprobs:
                    logprobs = logprobs_object(event.logprobs, self._processor) if has_logprobs else None
                    yield completion.chunk(delta, logprobs=logprobs)
            elif call.encoder is not None and (data := await _encode(call.encoder, event)):
                yield completion.chunk(audio(data=base64_text(data)))
            event = await call.events.next()
        if call.encoder is not None:
            if data := await _finish(call.encoder):
                yield completion.chunk(audio(data=base64_text(data)))
            if audio_id:
                yield completion.chunk(audio())
            yield completion.chunk({"audio": {"expires_at": completion.expires_at}})
        yield completion.chunk({}, finish_reason=event.finish_reason)
        if request.includes_usage:
            yield completion.usage_chunk(event)


async def _encode(encoder: Encoder, event: AudioDelta) -> bytes:
    samples = np.frombuffer(event.samples, dtype="<f4")
    return await asyncio.to_thread(encoder.encode, samples) if encoder.blocking else encoder.encode(samples)


async def _finish(encoder: Encoder) -> bytes:
    return await asyncio.to_thread(encoder.finish) if encoder.blocking else encoder.finish()
