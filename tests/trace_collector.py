"""An OpenTelemetry collector that a test can ask: it takes OTLP over http/protobuf."""

from __future__ import annotations

import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Listens on a port of its own while it is entered. `refusals` are the statuses of the next answers, 200 after."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.refusals: deque[int] = deque()
        self.paths: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = outer.refusals.popleft() if outer.refusals else 200
                if status == 200:
                    outer._take(self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing on the test's stderr."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def trace(self, trace_id: str) -> list[Span]:
        """Its spans, by start, and of those that start together the longer first."""
        found = [span for span in self.spans if span.trace_id.hex() == trace_id]
        return sorted(found, key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(values(group.resource.attributes))
            self.spans += [span for scope in group.scope_spans for span in scope.spans]


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as a collector gets them, as plain values."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [plain(item) for item in value.array_value.values]
        return getattr(value, kind)

    return {entry.key: plain(entry.value) for entry in attributes}
