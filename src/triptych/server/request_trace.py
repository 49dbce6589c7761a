"""The spans of one request: its HTTP exchange, loading its media, and each stage it went through.

Only what is about a request is in them, never what it says: no prompt, no answer, no message about a client's mistake.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from fastapi import Request
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from triptych.config.schema import StageKind
from triptych.errors import TriptychError
from triptych.media.contract import MediaPart
from triptych.pipeline.request import Done, GenerationRequest
from triptych.pipeline.stage_report import StageReport
from triptych.server.errors import status_of
from triptych.server.sse import ClientGone

MADE: dict[StageKind, str] = {
    "thinker": "triptych.text_tokens",
    "talker": "triptych.audio_frames",
    "code2wav": "triptych.audio_frames",
}


class RequestTrace:
    """A trace from its root span, which continues the one of the request's `traceparent` where it has one.

    Instants are seconds of `time.monotonic`, the event loop's clock. The root ends with the request; a stage that had
    to be aborted may tell of its end after that.
    """

    def __init__(self, tracer: Tracer, http: Request, stage_ids: Mapping[StageKind, int]) -> None:
        self._tracer = tracer
        self._stage_ids = stage_ids
        self._epoch_ns = time.time_ns() - time.monotonic_ns()  # once: a clock that is set meanwhile bends no span
        self._headers_sent = False
        path = http.scope["path"]  # one of the two under which the endpoint is known
        self._root = tracer.start_span(
            f"{http.method} {path}",
            TraceContextTextMapPropagator().extract(http.headers),
            SpanKind.SERVER,
            {
                "http.request.method": http.method,
                "http.route": path,
                "url.path": path,
                "url.scheme": http.scope["scheme"],
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "triptych",
            },
            start_time=self._now(),
        )
        self._context: Context = set_span_in_context(self._root)

    def reads(self, model: str, *, streams: bool, speaks: bool) -> None:
        """The body is a request for a model that is served here."""
        self._root.set_attributes(
            {
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.request.stream": streams,
                "gen_ai.output.type": "speech" if speaks else "text",
            }
        )

    @contextmanager
    def media(self, parts: Sequence[MediaPart]) -> Iterator[None]:
        """A span around loading what the request brought along."""
        counts = Counter(part.kind for part in parts)
        attributes = {f"triptych.media.{kind}_parts": count for kind, count in counts.items()}
        span = self._tracer.start_span("media", self._context, attributes=attributes, start_time=self._now())
        try:
            yield
        except BaseException as error:
            _blame(span, error)
            raise
        finally:
            span.end(self._now())

    def submits(self, request: GenerationRequest) -> None:
        """The request is on its way into the pipeline, tokenised and with every default filled in."""
        drawn, media = request.thinker, request.media_tokens
        self._root.set_attributes(
            {
                "gen_ai.response.id": request.request_id,
                "gen_ai.request.temperature": drawn.temperature,
                "gen_ai.request.top_p": drawn.top_p,
                "gen_ai.request.top_k": drawn.top_k,
                "gen_ai.request.frequency_penalty": drawn.frequency_penalty,
                "gen_ai.request.presence_penalty": drawn.presence_penalty,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                "triptych.usage.input_audio_tokens": media.audio,
                "triptych.usage.input_image_tokens": media.image,
                "triptych.usage.input_video_tokens": media.video,
            }
        )
        if drawn.max_tokens is not None:
            self._root.set_attribute("gen_ai.request.max_tokens", drawn.max_tokens)
        if drawn.seed is not None:
            self._root.set_attribute("gen_ai.request.seed", drawn.seed)

    def stage(self, report: StageReport) -> None:
        """The request's time in one stage, from when it had what it needs to begin, and the parts of that."""
        name = report.stage
        begin = report.announced if report.ready is None else report.ready
        span = self._tracer.start_span(
            name,
            self._context,
            attributes={
                "triptych.stage.name": name,
                "triptych.stage.id": self._stage_ids[name],
                "triptych.stage.replica": report.replica,
                "triptych.stage.outcome": report.outcome,
                MADE[name]: report.num_tokens,
            },
            start_time=self._ns(begin),
        )
        if report.finish_reason is not None:
            span.set_attribute("triptych.stage.finish_reason", report.finish_reason)
        if report.outcome == "failed":
            span.set_attribute("error.type", "StageError")
            span.set_status(StatusCode.ERROR)
        inside = set_span_in_context(span)
        ends = (report.started, report.first, None)
        for part, start, end in zip(("queue", "prefill", "decode"), (report.ready, *ends), ends, strict=False):
            if start is not None:
                child = self._tracer.start_span(f"{name} {part}", inside, start_time=self._ns(start))
                child.end(self._ns(report.ended if end is None else end))
        span.end(self._ns(report.ended))

    def sends_headers(self) -> None:
        """The status line of a stream goes out: whatever comes, it was 200."""
        self._headers_sent = True

    def end(self, outcome: str, measures: Mapping[str, float], result: Done | BaseException | None) -> None:
        """The request is over: `result` is how it was served, or why it was not; None when its client left.

        `outcome` and `measures` are those of `/metrics`, under their names there.
        """
        self._root.set_attribute("triptych.outcome", outcome)
        self._root.set_attributes({f"triptych.{name}": value for name, value in measures.items()})
        if isinstance(result, Done):
            self._root.set_attributes(
                {
                    "gen_ai.response.finish_reasons": [result.finish_reason],
                    "gen_ai.usage.output_tokens": result.text_tokens + result.audio_frames,
                    "gen_ai.usage.cache_read.input_tokens": result.cached_tokens,
                    "triptych.usage.text_tokens": result.text_tokens,
                    "triptych.usage.audio_frames": result.audio_frames,
                }
            )
        elif result is not None:
            _blame(self._root, result)
        status = 200 if self._headers_sent or isinstance(result, Done) else _status(result)
        if status is not None:
            self._root.set_attribute("http.response.status_code", status)
        self._root.end(self._now())

    def _now(self) -> int:
        return self._ns(time.monotonic())

    def _ns(self, instant: float) -> int:
        return self._epoch_ns + round(instant * 1e9)


def _status(error: BaseException | None) -> int | None:
    """The HTTP status of an error; None for a client that has left."""
    return status_of(error) if isinstance(error, Exception) and not isinstance(error, ClientGone) else None


def _blame(span: Span, error: BaseException) -> None:
    """As the conventions for HTTP servers have it: a client's mistake has a type, but is no error of the span."""
    status = _status(error)
    if status is None or isinstance(error, asyncio.CancelledError):
        return
    span.set_attribute("error.type", type(error).__name__)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR, str(error) if isinstance(error, TriptychError) else None))
