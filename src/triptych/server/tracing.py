"""Traces by OpenTelemetry, over OTLP, to a collector. An extra: `triptych[otel]`; nothing else imports OpenTelemetry.

Spans wait in a bounded queue and leave in batches from a thread of the SDK: no request waits for a collector. What the
SDK's own variables say (`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, `OTEL_EXPORTER_OTLP_HEADERS` and so on) holds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from fastapi import Request
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from triptych import __version__
from triptych.config.schema import DeployConfig, StageKind
from triptych.errors import ConfigError
from triptych.server.request_trace import RequestTrace

logger = logging.getLogger(__name__)

FLUSH_S = 5.0  # how long the last spans may take to leave at the end
TRACES_PATH = "/v1/traces"  # of every collector


class Tracing:
    """Begins the trace of each request, and sees that they leave. `processor` takes the spans that have ended."""

    def __init__(self, processor: SpanProcessor, deploy: DeployConfig) -> None:
        named = {"service.name": "triptych", "service.version": __version__}
        resource = Resource.create({**named, **OTELResourceDetector().detect().attributes})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("triptych", __version__)
        self._stage_ids: Mapping[StageKind, int] = {stage.stage: stage.stage_id for stage in deploy.stages}

    @classmethod
    def to(cls, endpoint: str, deploy: DeployConfig) -> Tracing:
        """Traces for the collector at `endpoint`, a URL as `traces_url` gives it."""
        return cls(BatchSpanProcessor(CollectorExporter(endpoint)), deploy)

    def begin(self, http: Request) -> RequestTrace:
        return RequestTrace(self._tracer, http, self._stage_ids)

    async def close(self) -> None:
        """Send what waits, for at most `FLUSH_S`."""
        # A thread that no one has to wait for: the SDK gives up after half a minute, or blocks in a connection.
        thread = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, FLUSH_S)
        if thread.is_alive():
            logger.warning("the last traces did not leave within %g s and are lost", FLUSH_S)


class CollectorExporter(SpanExporter):
    """Sends spans over http/protobuf; says once that they do not arrive, and why, and once that they do again."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._otlp = OTLPSpanExporter(endpoint=endpoint)
        self._complaints = _Complaints()
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._complaints.reason = None
        result = self._otlp.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            reason = self._complaints.reason or "no reason was given"
            logger.warning("traces do not arrive at %s and are dropped until they do: %s", self._endpoint, reason)
        elif self._failing and not failed:
            logger.info("traces arrive at %s again", self._endpoint)
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._otlp.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._otlp.force_flush(timeout_millis)


class _Complaints(logging.Handler):
    """Takes what OpenTelemetry logs. Its exporter complains of each try of each batch: `reason` is the first of those
    since it was last None. Of the rest each kind is passed on once."""

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None
        self._passed_on: set[str] = set()
        sdk = logging.getLogger("opentelemetry")
        sdk.addHandler(self)
        sdk.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("opentelemetry.exporter"):
            self.reason = self.reason or record.getMessage()
        elif str(record.msg) not in self._passed_on:
            self._passed_on.add(str(record.msg))
            logger.log(record.levelno, "%s", record.getMessage())


def traces_url(endpoint: str) -> str:
    """The URL that spans are posted to: `endpoint`, and a collector's usual path where it has none.

    Raises ConfigError for what is no such URL.
    """
    flag, example = "--otlp-traces-endpoint", "write for example http://localhost:4318/v1/traces"
    try:
        url = urlsplit(endpoint)
        host, _ = url.hostname, url.port  # both are parsed only now
    except ValueError as error:
        raise ConfigError(f"{endpoint!r} is no URL ({error}); {example}", flag) from error
    if url.username or url.password:
        raise ConfigError("credentials do not go into the URL but into OTEL_EXPORTER_OTLP_HEADERS", flag)
    if url.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{endpoint!r} is not an http or https URL, and spans go over http/protobuf; {example}", flag)
    return endpoint if url.path not in ("", "/") else url._replace(path=TRACES_PATH).geturl()
