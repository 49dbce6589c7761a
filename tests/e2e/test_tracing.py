"""One request, one trace: what a collector gets of the application, and of a live server with all its stages."""

from __future__ import annotations

import base64
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from PIL import Image

from tests.fake_pipeline import BASE, DEPLOY, SPEECH, SPEECH_SCRIPT, Connection, FakeLoader, FakeOrchestrator, client_of
from tests.live_server import LOAD_S, STOP_S, LiveServer, sse_events, wait_until
from tests.media_files import image_file, noise
from tests.trace_collector import Collector, values
from triptych.errors import RequestError, StageError
from triptych.pipeline.request import TextDelta
from triptych.server.tracing import Tracing

ROOT = "POST /v1/chat/completions"
PARTS = ("queue", "prefill", "decode")
STAGES = ("thinker", "talker", "code2wav")

# --- the application, over a scripted pipeline ---


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def app(make_app: Callable[..., FastAPI], exporter: InMemorySpanExporter) -> FastAPI:
    return make_app(tracing=Tracing(SimpleSpanProcessor(exporter), DEPLOY))


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_an_answer_is_a_trace_that_its_id_leads_to(
    app: FastAPI, exporter: InMemorySpanExporter, pipeline: FakeOrchestrator
) -> None:
    pipeline.script = SPEECH_SCRIPT
    async with client_of(app) as client:
        answer = await client.post("/v1/chat/completions", json=SPEECH | {"stream": True})
    [root] = exporter.get_finished_spans()
    found = attributes(root)
    assert found["gen_ai.response.id"] == answer.headers["x-request-id"] == pipeline.submitted[0].request_id
    assert found["gen_ai.request.model"] == "omni" and found["gen_ai.output.type"] == "speech"
    assert found["gen_ai.request.stream"] is True and found["gen_ai.usage.output_tokens"] == 6
    assert found["triptych.outcome"] == "stop" and found["triptych.audio_duration_s"] == pytest.approx(5 / 24000)
    measures = ("time_to_first_token_s", "audio_ttfp_s", "audio_rtf", "audio_underrun_s")
    assert all(found[f"triptych.{name}"] >= 0 for name in measures)


async def test_what_is_refused_before_a_stage_hears_of_it_is_a_trace_too(
    app: FastAPI, exporter: InMemorySpanExporter
) -> None:
    async with client_of(app) as client:
        await client.post("/chat/completions", json=BASE | {"model": "nope"})
        await client.get("/v1/models")
    [root] = exporter.get_finished_spans()
    assert root.name == "POST /chat/completions"
    assert attributes(root)["error.type"] == "ModelNotFoundError" and attributes(root)["triptych.outcome"] == "refused"
    assert attributes(root)["http.response.status_code"] == 404 and "gen_ai.request.model" not in attributes(root)


@pytest.mark.parametrize(("streams", "status"), [(True, 200), (False, 500)])
async def test_a_failure_has_the_status_that_went_out(
    app: FastAPI, exporter: InMemorySpanExporter, pipeline: FakeOrchestrator, streams: bool, status: int
) -> None:
    pipeline.script = [TextDelta(text="Hel", num_tokens=1), StageError("it broke", "talker")]
    async with client_of(app) as client:
        answer = await client.post("/v1/chat/completions", json=BASE | {"stream": streams})
    [root] = exporter.get_finished_spans()
    assert attributes(root)["http.response.status_code"] == answer.status_code == status
    assert attributes(root)["error.type"] == "StageError" and not root.status.is_ok


async def test_a_client_that_leaves_ends_its_trace(
    app: FastAPI, exporter: InMemorySpanExporter, pipeline: FakeOrchestrator
) -> None:
    pipeline.script = [TextDelta(text="Hel", num_tokens=1), *SPEECH_SCRIPT]
    connection = Connection(app, SPEECH | {"stream": True})
    await connection.read()
    connection.leave()
    await connection.ended()
    [root] = exporter.get_finished_spans()
    assert attributes(root)["triptych.outcome"] == "disconnected" and "error.type" not in attributes(root)


@pytest.mark.parametrize("refusal", [None, RequestError("not a picture", "messages.0.content.0")])
async def test_media_is_in_the_trace_whether_it_could_be_loaded_or_not(
    app: FastAPI, exporter: InMemorySpanExporter, loader: FakeLoader, refusal: RequestError | None
) -> None:
    loader.refusal = refusal
    content = [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
    async with client_of(app) as client:
        await client.post("/v1/chat/completions", json=BASE | {"messages": [{"role": "user", "content": content}]})
    media, root = exporter.get_finished_spans()
    assert media.parent is not None and media.parent.span_id == root.context.span_id
    assert attributes(media).get("error.type") == attributes(root).get("error.type")
    assert attributes(media)["triptych.media.image_parts"] == 1
    assert attributes(root)["triptych.outcome"] == ("stop" if refusal is None else "refused")


# --- a live server ---


def traceparent(number: int) -> tuple[str, dict[str, str]]:
    """The id of a client's trace, and the header that carries it."""
    trace_id = f"{number:032x}"
    return trace_id, {"traceparent": f"00-{trace_id}-00000000000000ab-01"}


def check_tree(spans: Sequence[Span], stages: Sequence[str], *, media: bool = False) -> dict[str, Span]:
    """The spans by name: a root below the client's span, below it media and the stages, and below these their parts,
    which follow each other without a gap. Every child lies in its parent as far as that can be told."""
    named = {span.name: span for span in spans}
    assert set(named) == {ROOT, *(["media"] if media else []), *stages, *(f"{s} {p}" for s in stages for p in PARTS)}
    assert len(named) == len(spans)
    root = named[ROOT]
    assert root.parent_span_id.hex() == "00000000000000ab" and root.kind == Span.SPAN_KIND_SERVER
    for name in (*(["media"] if media else []), *stages):
        assert named[name].parent_span_id == root.span_id
        assert root.start_time_unix_nano <= named[name].start_time_unix_nano
        assert named[name].start_time_unix_nano < named[name].end_time_unix_nano
    for name in stages:
        stage, parts = named[name], [named[f"{name} {part}"] for part in PARTS]
        assert {part.parent_span_id for part in parts} == {stage.span_id}
        edges = [stage.start_time_unix_nano, *(part.end_time_unix_nano for part in parts)]
        assert edges == sorted(edges) and edges[-1] == stage.end_time_unix_nano
        assert [part.start_time_unix_nano for part in parts] == edges[:-1]
    return named


def test_a_collector_gets_the_whole_way_of_each_request(nano: Path, tmp_path: Path) -> None:
    picture = base64.b64encode(image_file(Image.fromarray(noise(40, 60)))).decode()
    base = {
        "model": "nano",
        "messages": [{"role": "user", "content": "hello"}],
        "seed": 3,
        "max_tokens": 12,
        "ignore_eos": True,
        "sampling_params_list": [{}, {"ignore_eos": True, "max_tokens": 40}],
    }
    seen = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}]
    speech = base | {
        "messages": [{"role": "user", "content": [*seen, {"type": "text", "text": "What is it?"}]}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "chelsie", "format": "pcm16"},
        "stream": True,
    }
    longest = [{}, {"ignore_eos": True, "max_tokens": 4000}]
    endless = speech | {"messages": base["messages"], "max_tokens": 4000, "sampling_params_list": longest}
    with (
        Collector() as collector,
        LiveServer(nano, "--otlp-traces-endpoint", collector.url, log=tmp_path / "log") as server,
        httpx.Client(base_url=server.url, timeout=LOAD_S) as client,
    ):

        def ask(number: int, body: dict[str, Any]) -> httpx.Response:
            return client.post("/v1/chat/completions", json=body, headers=traceparent(number)[1])

        def begin(number: int, body: dict[str, Any]) -> Any:
            return client.stream("POST", "/v1/chat/completions", json=body, headers=traceparent(number)[1])

        spoken, written = ask(1, speech), ask(2, base)
        assert (spoken.status_code, written.status_code) == (200, 200)
        assert ask(3, base | {"max_tokens": 10**6}).status_code == 400
        with begin(4, endless) as left:
            next(left.iter_lines())
        wait_until(lambda: not server.held(), 30, server.held)
        with begin(5, endless) as failing:
            lines = failing.iter_lines()
            first = next(lines)
            server.child("speech").kill()
            events = sse_events([first, *lines])
        assert "error" in events[-1]
        wait_until(lambda: not server.held(), 30, server.held)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_S) == 0, server.said()
        said = server.said()
    assert "traces" not in said
    assert collector.paths == {"/v1/traces"}
    assert {resource["service.name"] for resource in collector.resources} == {"triptych"}

    spans = check_tree(collector.trace(traceparent(1)[0]), STAGES, media=True)
    root = values(spans[ROOT].attributes)
    assert root["gen_ai.response.id"] == spoken.headers["x-request-id"]
    assert root["gen_ai.request.model"] == "nano" and root["gen_ai.request.seed"] == 3
    assert root["triptych.usage.input_image_tokens"] > 0
    assert root["gen_ai.response.finish_reasons"] == [root["triptych.outcome"]]
    made = {name: values(spans[name].attributes) for name in STAGES}
    assert made["thinker"]["triptych.text_tokens"] == root["triptych.usage.text_tokens"] == 12
    for name in ("talker", "code2wav"):
        assert made[name]["triptych.audio_frames"] == root["triptych.usage.audio_frames"] == 40
    assert [made[name]["triptych.stage.id"] for name in STAGES] == [0, 1, 2]
    assert {made[name]["triptych.stage.outcome"] for name in STAGES} == {"finished"}
    starts = [spans[name].start_time_unix_nano for name in ("media", "thinker", "code2wav")]
    assert starts == sorted(starts), "Code2Wav waits for its first chunk, not from the beginning"
    assert all(span.end_time_unix_nano <= spans[ROOT].end_time_unix_nano for span in spans.values())

    spans = check_tree(collector.trace(traceparent(2)[0]), ["thinker"])
    root = values(spans[ROOT].attributes)
    assert root["gen_ai.output.type"] == "text" and root["gen_ai.usage.output_tokens"] == 12
    assert root["gen_ai.usage.input_tokens"] == written.json()["usage"]["prompt_tokens"]

    [refused] = collector.trace(traceparent(3)[0])
    assert values(refused.attributes)["error.type"] == "ContextLengthError"
    assert refused.status.code == Status.STATUS_CODE_UNSET

    left_spans = {span.name: span for span in collector.trace(traceparent(4)[0])}
    assert values(left_spans[ROOT].attributes)["triptych.outcome"] == "disconnected"
    outcomes = {name: values(left_spans[name].attributes)["triptych.stage.outcome"] for name in STAGES}
    assert outcomes == dict.fromkeys(STAGES, "aborted")
    assert "thinker decode" in left_spans

    failed_spans = {span.name: span for span in collector.trace(traceparent(5)[0])}
    root = values(failed_spans[ROOT].attributes)
    assert (root["error.type"], root["triptych.outcome"]) == ("StageError", "failed")
    assert failed_spans[ROOT].status.code == Status.STATUS_CODE_ERROR
    assert "talker" in failed_spans[ROOT].status.message
    outcomes = {name: values(failed_spans[name].attributes)["triptych.stage.outcome"] for name in STAGES}
    assert outcomes == {"thinker": "aborted", "talker": "failed", "code2wav": "aborted"}
    assert failed_spans["talker"].status.code == Status.STATUS_CODE_ERROR
    assert not [name for name in failed_spans if name.startswith("talker ")], "the dead tell nothing"


def test_a_collector_that_cannot_be_reached_is_nobody_s_trouble(nano: Path, tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:1/v1/traces"
    with LiveServer(nano, "--otlp-traces-endpoint", nowhere, "--text-only", log=tmp_path / "log") as server:
        for number in range(3):
            body = {"model": "nano", "messages": [{"role": "user", "content": f"hello {number}"}], "max_tokens": 4}
            assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=LOAD_S).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_S) == 0, server.said()
        said = server.said()
    outage, rest = said.count("traces do not arrive"), said.count("the last traces did not leave")
    assert outage <= 1 and rest <= 1 and outage + rest >= 1, said
    assert said.count("opentelemetry") == said.count("Traceback") == 0, said
