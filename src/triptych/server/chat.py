"""`POST /v1/chat/completions`: from the request's bytes to one choice, whole or streamed.

Everything that can be wrong with a request is found before a stage hears of it. A failure before the first event is an
HTTP error; one after it is an error event that ends the stream without `[DONE]` and without a finish reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
from fastapi import Request
from fastapi.responses import Response

from triptych.config.schema import DeployConfig
from triptych.connectors.wire import TokenLogprob
from triptych.errors import CapacityError, RequestError, StageError, TriptychError
from triptych.media.contract import MediaLease, MediaLoader, MediaPart
from triptych.models.qwen3_omni.config import OmniConfig
from triptych.models.qwen3_omni.processor import Processor
from triptych.pipeline.health import PipelineHealth
from triptych.pipeline.media import load_media
from triptych.pipeline.prepare import check_request, context_length, prepare
from triptych.pipeline.request import AudioDelta, Done, Event, GenerationRequest, TextDelta
from triptych.server import sse
from triptych.server.audio import FORMATS, Encoder, encodable, make_encoder
from triptych.server.completion import Completion, base64_text, logprobs_object
from triptych.server.errors import ModelNotFoundError, error_body
from triptych.server.metrics import Metrics
from triptych.server.protocol import ChatCompletionRequest, parse_chat_request
from triptych.server.request_clock import RequestClock
from triptych.server.transcripts import Transcripts

if TYPE_CHECKING:
    from triptych.server.tracing import Tracing

logger = logging.getLogger(__name__)

BODIES_HELD = 4  # bodies of the largest size that may be in memory at once


class EventStream(Protocol):
    """One request's events, the last of them Done. A failure is raised after what came before it."""

    async def __anext__(self) -> Event: ...

    async def aclose(self) -> None:
        """Abort the request in all its stages unless it has ended. Idempotent."""


class Orchestrator(Protocol):
    """What the server needs of the pipeline."""

    def submit(self, request: GenerationRequest) -> EventStream:
        """Raises RequestError when the request cannot be served, CapacityError when it cannot be served now."""

    def check_room(self, *, speak: bool) -> None:
        """Raises CapacityError when a request could not be taken now, whatever it is."""

    def health(self) -> PipelineHealth: ...


class _Media:
    """What a request brought along: held from the moment it is loaded, so that no cancellation loses it, and let go of
    where the pipeline does not take the request."""

    def __init__(self) -> None:
        self.lease: MediaLease | None = None

    def close(self) -> None:
        if self.lease is not None:
            self.lease.close()


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
    """One request that the pipeline has taken, without the body it came in: that may be large."""

    completion: Completion
    events: Events
    encoder: Encoder | None  # None when no audio is asked for
    wants_text: bool
    streams: bool
    includes_usage: bool
    has_logprobs: bool

    async def aclose(self, error: BaseException | None = None) -> None:
        """Let go of the request and of its encoder. `error` as in `Events.aclose`."""
        await self.events.aclose(error)
        if self.encoder is not None:
            # On a thread, as another may be encoding; and to its end, though the request's task is cancelled.
            await asyncio.shield(asyncio.to_thread(self.encoder.close))


class Chat:
    """The endpoint. `model_names` are the names a request may give. `tracing` None: no request is traced."""

    def __init__(
        self,
        *,
        orchestrator: Orchestrator,
        loader: MediaLoader,
        processor: Processor,
        config: OmniConfig,
        deploy: DeployConfig,
        metrics: Metrics,
        model_names: Sequence[str],
        tracing: Tracing | None,
    ) -> None:
        self._orchestrator = orchestrator
        self._loader = loader
        self._processor = processor
        self._config = config
        self._deploy = deploy
        self._metrics = metrics
        self._model_names = model_names
        self._tracing = tracing
        self._bodies = sse.BodyRoom(BODIES_HELD * deploy.media.max_body_bytes)
        self._transcripts = Transcripts()

    async def complete(self, http: Request) -> Response:
        """Answer one HTTP request. Raises TriptychError, or ClientGone when the client has left."""
        clock = RequestClock(self._metrics, self._tracing.begin(http) if self._tracing is not None else None)
        try:
            with self._bodies.enter() as grow:
                call = await self._submit(http, clock, grow)
        except BaseException as error:
            clock.end(error)
            raise
        headers = {"X-Request-Id": call.completion.id}
        try:
            if not call.streams:
                answer = await sse.until_disconnect(http.receive, self._whole(call))
                await call.aclose()
                return Response(msgspec.json.encode(answer), media_type="application/json", headers=headers)
            # Headers wait for the first event, so that a request which fails before it gets an honest status.
            first = await sse.until_disconnect(http.receive, call.events.next())
            if clock.trace is not None:
                clock.trace.sends_headers()
        except BaseException as error:
            await call.aclose(error)
            raise
        return sse.EventResponse(self._stream(call, first), call.aclose, headers)

    async def _submit(self, http: Request, clock: RequestClock, grow: Callable[[int], None]) -> Call:
        body = await sse.read_json_body(http, self._deploy.media.max_body_bytes, self._deploy.request_timeout_s, grow)
        arrival = asyncio.get_running_loop().time()
        request, parts = await asyncio.to_thread(self._read, body)
        del body  # what it holds may be large, and loading what it names take long
        trace = clock.trace
        if trace is not None:
            trace.reads(request.model, streams=bool(request.stream), speaks=request.wants_audio)
        completion = Completion(model=request.model, audio_lifetime_s=self._deploy.audio_id_lifetime_s)
        media = _Media()
        try:
            if parts:  # what can be refused without them is
                self._orchestrator.check_room(speak=request.wants_audio)
                await asyncio.to_thread(check_request, **self._asked(request))
                with trace.media(parts) if trace is not None else contextlib.nullcontext():
                    await sse.until_disconnect(http.receive, self._load(parts, request, media, arrival))
                parts.clear()
            generation = await asyncio.to_thread(self._prepare, request, completion.id, media.lease)
            generation = dataclasses.replace(generation, arrival=arrival)
            if trace is not None:
                generation = dataclasses.replace(generation, on_stage=trace.stage)
                trace.submits(generation)
            events = Events(self._orchestrator.submit(generation), clock)
        except BaseException as error:
            media.close()
            if isinstance(error, RequestError):
                error.param = request.written(error.param)
            raise
        try:
            encoder = self._encoder(request)
        except BaseException as error:
            await events.aclose(error)
            raise
        return Call(
            completion=completion,
            events=events,
            encoder=encoder,
            wants_text=request.wants_text,
            streams=bool(request.stream),
            includes_usage=request.includes_usage,
            has_logprobs=generation.thinker.logprobs is not None,
        )

    def _read(self, body: bytes) -> tuple[ChatCompletionRequest, list[MediaPart]]:
        request = parse_chat_request(body)
        if request.model not in self._model_names:
            raise ModelNotFoundError(request.model, self._model_names)
        if request.wants_audio and not encodable(request.audio_format):
            able = ", ".join(name for name in FORMATS if encodable(name))
            raise RequestError(
                f"this build cannot encode {request.audio_format!r}; it can encode {able}", "audio.format"
            )
        return request, request.media()

    async def _load(
        self, parts: Sequence[MediaPart], request: ChatCompletionRequest, media: _Media, arrival: float
    ) -> None:
        media.lease = await load_media(
            self._loader,
            parts,
            request.media_options(),
            max_rows=context_length(self._config, self._deploy),
            arrival=arrival,
            timeout_s=self._deploy.request_timeout_s,
        )

    def _encoder(self, request: ChatCompletionRequest) -> Encoder | None:
        if not request.wants_audio:
            return None
        return make_encoder(request.audio_format, streaming=bool(request.stream), sample_rate=self._config.sample_rate)

    def _prepare(self, request: ChatCompletionRequest, request_id: str, lease: MediaLease | None) -> GenerationRequest:
        media = lease.items if lease is not None else ()
        return prepare(**self._asked(request), request_id=request_id, media=media, lease=lease)

    def _asked(self, request: ChatCompletionRequest) -> dict[str, Any]:
        """What `prepare` and `check_request` want to know of a request."""
        thinker, talker = request.overrides()
        return {
            "processor": self._processor,
            "config": self._config,
            "deploy": self._deploy,
            "messages": self._messages(request),
            "speak": request.wants_audio,
            "thinker": thinker,
            "talker": talker,
            "voice": request.speaker_name,
            "seed": request.seed,
        }

    def _messages(self, request: ChatCompletionRequest) -> list[dict[str, Any]]:
        """The messages as the chat template takes them, spoken answers in the words that were said."""
        messages = []
        for index, message in enumerate(request.messages):
            audio_id = message.spoken_id
            spoken = None
            if audio_id is not None:
                spoken = self._transcripts.find(audio_id, f"messages.{index}.audio.id")
            messages.append(message.for_template(spoken))
        return messages

    def _remember(self, call: Call, text: str) -> None:
        self._transcripts.keep(call.completion.audio_id, text, call.completion.expires_at)

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
        message: dict[str, Any] = {"content": text if call.wants_text else None}
        if call.encoder is not None:
            audio.append(await _finish(call.encoder))
            self._remember(call, text)
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
                yield sse.event({"usage": None} | chunk if call.includes_usage else chunk)
        except Exception as error:
            if isinstance(error, TriptychError):
                logger.warning("request %s failed while it was streamed: %s", call.completion.id, error)
            else:
                logger.exception("request %s failed while it was streamed", call.completion.id)
            await call.aclose(error)
            yield sse.event(error_body(error))
            return
        yield sse.DONE

    async def _chunks(self, call: Call, first: Event) -> AsyncGenerator[dict[str, Any]]:
        """The role; text and audio as they come; `expires_at` alone; the finish reason alone; usage when asked for."""
        completion = call.completion
        texts: list[str] = []
        audio_id = {"id": completion.audio_id}  # goes with the first audio update, and only there

        def audio(**fields: str) -> dict[str, Any]:
            update = audio_id | fields
            audio_id.clear()
            return {"audio": update}

        yield completion.chunk({"role": "assistant", "content": "" if call.wants_text else None})
        event = first
        while not isinstance(event, Done):
            if isinstance(event, TextDelta):
                delta: dict[str, Any] = {}
                texts.append(event.text)
                if event.text and call.wants_text:
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
            self._remember(call, "".join(texts))
            yield completion.chunk({"audio": {"expires_at": completion.expires_at}})
        yield completion.chunk({}, finish_reason=event.finish_reason)
        if call.includes_usage:
            yield completion.usage_chunk(event)


async def _encode(encoder: Encoder, event: AudioDelta) -> bytes:
    samples = np.frombuffer(event.samples, dtype="<f4")
    return await asyncio.to_thread(encoder.encode, samples) if encoder.blocking else encoder.encode(samples)


async def _finish(encoder: Encoder) -> bytes:
    return await asyncio.to_thread(encoder.finish) if encoder.blocking else encoder.finish()
