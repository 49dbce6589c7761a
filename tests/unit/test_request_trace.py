"""The spans that are made of a request, and their way out: nobody waits for it, and nobody hears of it twice."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from tests.fake_pipeline import DEPLOY
from tests.trace_collector import Collector
from triptych.cli import serve
from triptych.config.sampling import SamplingParams
from triptych.connectors.wire import TextOutput, decode_to_server, encode
from triptych.errors import CapacityError, ConfigError, ContextLengthError, DeadlineError, StageError
from triptych.media.contract import MediaPart
from triptych.pipeline.request import Done, GenerationRequest, MediaTokens
from triptych.pipeline.stage_report import Outcome, StageReport
from triptych.server import tracing
from triptych.server.request_trace import RequestTrace
from triptych.server.sse import ClientGone
from triptych.server.tracing import CollectorExporter, Tracing, traces_url
from triptych.telemetry.stage_times import StageTimes

ROOT = Path(__file__).parents[2]
CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
DONE = Done(finish_reason="length", prompt_tokens=9, cached_tokens=8, text_tokens=3, audio_frames=5)


class Traced:
    """Tracing whose spans stay in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing(SimpleSpanProcessor(self.exporter), DEPLOY)

    def begin(self, **headers: str) -> RequestTrace:
        return self.tracing.begin(http_request(headers))

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        """Those that have ended, by name."""
        spans = {span.name: span for span in self.exporter.get_finished_spans()}
        assert len(spans) == len(self.exporter.get_finished_spans())
        return spans

    @property
    def root(self) -> ReadableSpan:
        return self.spans["POST /v1/chat/completions"]


@pytest.fixture
def traced() -> Traced:
    return Traced()


def http_request(headers: dict[str, str]) -> Request:
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "scheme": "http", "path": "/v1/chat/completions", "headers": encoded}
    return Request(scope)


def report(outcome: Outcome = "finished", **values: Any) -> StageReport:
    base: dict[str, Any] = {
        "stage": "talker",
        "replica": 1,
        "announced": time.monotonic() - 10,
        "ended": time.monotonic(),
        "times": StageTimes(ready=9.0, started=7.0, first=4.0),
        "num_tokens": 12,
    }
    return StageReport(outcome=outcome, **(base | values))


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def parent(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None


# --- what stages tell ---


def test_instants_travel_as_how_long_ago_they_were() -> None:
    times = StageTimes.until(110.0, ready=100.0, started=104.0, first=None)
    assert times == StageTimes(ready=10.0, started=6.0, first=None)
    message = TextOutput(request_id="r", seq=0, text="", num_tokens=1, finish_reason="stop", times=times)
    assert decode_to_server(encode(message)) == message


def test_instants_are_on_the_clock_of_the_server_and_never_before_the_announcement() -> None:
    late = report(announced=1000.0, ended=1008.0, times=StageTimes(ready=9.0, started=7.0))
    assert (late.ready, late.started, late.first) == (1000.0, 1001.0, None)


# --- spans ---


def test_a_stage_is_a_span_of_three_parts_below_the_request(traced: Traced) -> None:
    trace = traced.begin()
    trace.stage(report(finish_reason="stop"))
    trace.end("stop", {}, DONE)
    root, stage = traced.root, traced.spans["talker"]
    assert root.kind is SpanKind.SERVER and root.parent is None
    assert parent(stage) == root.context.span_id and stage.status.status_code is StatusCode.UNSET
    assert attributes(stage) == {
        "triptych.stage.name": "talker",
        "triptych.stage.id": 1,
        "triptych.stage.replica": 1,
        "triptych.stage.outcome": "finished",
        "triptych.stage.finish_reason": "stop",
        "triptych.audio_frames": 12,
    }
    parts = [traced.spans[f"talker {part}"] for part in ("queue", "prefill", "decode")]
    assert [seconds(part) for part in parts] == pytest.approx([2, 3, 4])
    assert {parent(part) for part in parts} == {stage.context.span_id}
    assert seconds(stage) == pytest.approx(9)
    assert [part.start_time for part in parts] == [stage.start_time, parts[0].end_time, parts[1].end_time]
    assert parts[2].end_time == stage.end_time
    ends_ago = time.time_ns() - (stage.end_time or 0)
    assert 0 <= ends_ago < 60e9, "spans are on the wall clock"


@pytest.mark.parametrize(
    ("times", "parts", "length"),
    [
        (StageTimes(), {}, 10),
        (StageTimes(ready=9), {"queue": 9}, 9),
        (StageTimes(ready=9, started=7), {"queue": 2, "prefill": 7}, 9),
    ],
)
def test_a_stage_that_ended_early_has_the_parts_that_it_came_to(
    traced: Traced, times: StageTimes, parts: dict[str, float], length: float
) -> None:
    traced.begin().stage(report("aborted", times=times))
    spans = traced.spans
    assert seconds(spans.pop("talker")) == pytest.approx(length)
    assert {name.removeprefix("talker "): round(seconds(span), 3) for name, span in spans.items()} == parts


def test_a_stage_that_failed_is_an_error_and_one_that_was_aborted_is_not(traced: Traced) -> None:
    trace = traced.begin()
    trace.stage(report("failed", stage="thinker"))
    trace.stage(report("aborted", stage="code2wav"))
    failed, aborted = traced.spans["thinker"], traced.spans["code2wav"]
    assert failed.status.status_code is StatusCode.ERROR and attributes(failed)["error.type"] == "StageError"
    assert aborted.status.status_code is StatusCode.UNSET and "error.type" not in attributes(aborted)
    assert attributes(failed)["triptych.text_tokens"] == 12


def test_the_trace_of_the_client_goes_on(traced: Traced) -> None:
    trace = traced.begin(traceparent=f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01", tracestate="vendor=1")
    trace.stage(report())
    trace.end("stop", {}, DONE)
    assert {format_trace_id(span.context.trace_id) for span in traced.spans.values()} == {CLIENT_TRACE}
    assert traced.root.parent is not None and format_span_id(traced.root.parent.span_id) == CLIENT_SPAN
    assert traced.root.context.trace_state.get("vendor") == "1"


def test_a_client_that_is_not_sampled_is_not_traced(traced: Traced) -> None:
    trace = traced.begin(traceparent=f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-00")
    trace.stage(report())
    trace.end("stop", {}, DONE)
    assert not traced.spans


@pytest.mark.parametrize("header", ["", "00-zz-1-01", f"00-{'0' * 32}-{CLIENT_SPAN}-01", "x" * 5000])
def test_a_traceparent_that_is_none_begins_a_trace(traced: Traced, header: str) -> None:
    traced.begin(traceparent=header).end("stop", {}, DONE)
    assert traced.root.parent is None


def test_the_root_says_what_was_asked_and_what_it_took_and_nothing_that_was_said(traced: Traced) -> None:
    trace = traced.begin()
    trace.reads("omni", streams=True, speaks=True)
    trace.submits(
        GenerationRequest(
            request_id="chatcmpl-1",
            prompt_token_ids=tuple(range(9)),
            thinker=SamplingParams(temperature=0.5, max_tokens=64, seed=3, stop=("secret",)),
            media_tokens=MediaTokens(image=4),
        )
    )
    trace.end("length", {"time_to_first_token_s": 0.25}, DONE)
    assert attributes(traced.root) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "triptych",
        "gen_ai.request.model": "omni",
        "gen_ai.response.model": "omni",
        "gen_ai.request.stream": True,
        "gen_ai.output.type": "speech",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.seed": 3,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "triptych.usage.input_audio_tokens": 0,
        "triptych.usage.input_image_tokens": 4,
        "triptych.usage.input_video_tokens": 0,
        "triptych.usage.text_tokens": 3,
        "triptych.usage.audio_frames": 5,
        "triptych.outcome": "length",
        "triptych.time_to_first_token_s": 0.25,
    }


@pytest.mark.parametrize(
    ("error", "kind", "status", "description"),
    [
        (ContextLengthError("the prompt says: secret"), "ContextLengthError", 400, None),
        (CapacityError("full"), "CapacityError", 429, None),
        (CapacityError("down", status=503), "CapacityError", 503, "down"),
        (StageError("it broke", "talker"), "StageError", 500, "it broke"),
        (DeadlineError("too long", "talker"), "DeadlineError", 504, "too long"),
        (ValueError("secret"), "ValueError", 500, None),
    ],
)
def test_an_error_has_its_type_and_is_one_of_the_span_where_the_server_is_at_fault(
    traced: Traced, error: Exception, kind: str, status: int, description: str | None
) -> None:
    traced.begin().end("any", {}, error)
    found = attributes(traced.root)
    assert (found["error.type"], found["http.response.status_code"]) == (kind, status)
    code = StatusCode.ERROR if status >= 500 else StatusCode.UNSET
    assert (traced.root.status.status_code, traced.root.status.description) == (code, description)
    assert not traced.root.events, "no traceback: it may quote the request"


@pytest.mark.parametrize("error", [None, ClientGone(), asyncio.CancelledError()])
def test_a_client_that_leaves_is_no_error(traced: Traced, error: BaseException | None) -> None:
    traced.begin().end("disconnected", {}, error)
    found = attributes(traced.root)
    assert found["triptych.outcome"] == "disconnected"
    assert "error.type" not in found and "http.response.status_code" not in found
    assert traced.root.status.status_code is StatusCode.UNSET


def test_a_stream_that_fails_has_the_status_that_its_client_saw(traced: Traced) -> None:
    trace = traced.begin()
    trace.sends_headers()
    trace.end("failed", {}, StageError("it broke", "talker"))
    assert attributes(traced.root)["http.response.status_code"] == 200
    assert traced.root.status.status_code is StatusCode.ERROR


def test_media_is_a_span_with_what_there_was_of_each_kind(traced: Traced) -> None:
    trace = traced.begin()
    parts = [MediaPart(kind=kind, param="p", url="https://secret/") for kind in ("image", "image", "audio")]
    with trace.media(parts):
        assert "media" not in traced.spans
    media = traced.spans["media"]
    assert attributes(media) == {"triptych.media.image_parts": 2, "triptych.media.audio_parts": 1}
    assert seconds(media) >= 0


def test_media_that_cannot_be_had_has_the_error(traced: Traced) -> None:
    with pytest.raises(DeadlineError), traced.begin().media([]):
        raise DeadlineError("too slow", "media")
    assert traced.spans["media"].status.status_code is StatusCode.ERROR


def test_the_docs_name_every_attribute_and_no_other(traced: Traced) -> None:
    trace, failing = traced.begin(), Traced()
    trace.reads("omni", streams=True, speaks=True)
    sampling = SamplingParams(max_tokens=64, seed=3)
    trace.submits(GenerationRequest(request_id="r", prompt_token_ids=(1,), thinker=sampling))
    with trace.media([MediaPart(kind=kind, param="p") for kind in ("image", "audio", "video")]):
        trace.stage(report(stage="thinker", finish_reason="stop"))
        trace.stage(report(stage="code2wav"))
    measures = ("time_to_first_token_s", "audio_ttfp_s", "audio_duration_s", "audio_rtf", "audio_underrun_s")
    trace.end("stop", dict.fromkeys(measures, 1.0), DONE)
    failing.begin().end("failed", {}, StageError("no", "talker"))
    spans = [*traced.spans.values(), *failing.spans.values()]
    page = (ROOT / "docs" / "tracing.md").read_text(encoding="utf-8")
    documented = {
        name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)
    }
    assert documented == {name for span in spans for name in attributes(span)}


# --- the way out ---


@pytest.fixture
def quiet_sdk() -> Iterator[None]:
    """Undo what an exporter does to the SDK's logger."""
    sdk = logging.getLogger("opentelemetry")
    before = (list(sdk.handlers), sdk.propagate)
    yield
    sdk.handlers, sdk.propagate = list(before[0]), before[1]


@pytest.mark.usefixtures("quiet_sdk")
def test_an_outage_is_said_once_with_its_reason_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    traced = Traced()
    traced.begin().end("stop", {}, DONE)
    with Collector() as collector:
        collector.refusals.extend((400, 401, 404))
        exporter = CollectorExporter(f"{collector.url}/v1/traces")
        results = [exporter.export([traced.root]) for _ in range(5)]
        collector.refusals.append(403)
        results.append(exporter.export([traced.root]))
        exporter.shutdown()
    failed, fine = SpanExportResult.FAILURE, SpanExportResult.SUCCESS
    assert results == [failed] * 3 + [fine] * 2 + [failed]
    assert [span.name for span in collector.spans] == ["POST /v1/chat/completions"] * 2
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(f" {collector.url}/v1/traces ")[0] for line in said] == [
        "traces do not arrive at",
        "traces arrive at",
        "traces do not arrive at",
    ]
    assert "400" in said[0] and "403" in said[2]


@pytest.mark.usefixtures("quiet_sdk")
def test_what_else_the_sdk_says_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    CollectorExporter("http://127.0.0.1:1/v1/traces").shutdown()
    for number in range(3):
        logging.getLogger("opentelemetry.sdk.anything").warning("Queue full, dropping %s.", number)
    assert [record.getMessage() for record in caplog.records] == ["Queue full, dropping 0."]


class Stuck(SpanProcessor):
    """Its spans never leave, until the test lets them."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def shutdown(self) -> None:
        self.let_go.wait(60)


async def test_the_end_waits_for_the_last_traces_only_so_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "FLUSH_S", 0.05)
    stuck = Stuck()
    await asyncio.wait_for(Tracing(stuck, DEPLOY).close(), 30)
    assert "the last traces did not leave within 0.05 s" in caplog.text
    stuck.let_go.set()


async def test_the_end_sends_what_waits() -> None:
    class Keeping(SpanProcessor):
        closed = False

        def shutdown(self) -> None:
            self.closed = True

    processor = Keeping()
    await Tracing(processor, DEPLOY).close()
    assert processor.closed


def test_the_resource_is_triptych_unless_the_environment_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def service(spans: Sequence[ReadableSpan]) -> list[Any]:
        return [span.resource.attributes["service.name"] for span in spans]

    traced = Traced()
    traced.begin().end("stop", {}, DONE)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "speech")
    named = Traced()
    named.begin().end("stop", {}, DONE)
    assert service([traced.root, named.root]) == ["triptych", "speech"]


# --- the flag ---


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://[::1]:4318/other/path?key=1", "http://[::1]:4318/other/path?key=1"),
    ],
)
def test_a_collector_without_a_path_has_the_usual_one(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize(
    ("endpoint", "complaint"),
    [
        ("grpc://localhost:4317", r"'grpc://localhost:4317' is not an http or https URL.*http://localhost:4318/v1/tra"),
        ("localhost:4318", "not an http or https URL"),
        ("", "not an http or https URL"),
        ("http://:4318", "not an http or https URL"),
        ("http://host:port", "no URL"),
        ("http://user:pass@host", "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_what_is_no_url_of_a_collector_is_refused(endpoint: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        traces_url(endpoint)
    assert caught.value.path == "--otlp-traces-endpoint" and "pass@" not in str(caught.value)


def test_without_the_extra_the_flag_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triptych.server.tracing")
    monkeypatch.delitem(sys.modules, "triptych.server.request_trace")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint: .*pip install 'triptych\[otel\]'"):
        serve._traces_url("http://localhost:4318")


def test_without_the_flag_nothing_needs_the_extra() -> None:
    script = (
        "import sys\nfor name in ('sdk', 'exporter'): sys.modules[f'opentelemetry.{name}'] = None\n"
        "import triptych.cli.serve, triptych.server.app, triptych.server.chat, triptych.stages.process"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
