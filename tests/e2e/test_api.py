"""The HTTP API over a scripted pipeline, in process: OpenAI's shapes, errors, clients that leave, probes, metrics."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
import uvicorn
from fastapi import FastAPI

from tests.fake_pipeline import (
    BASE,
    DEPLOY,
    SPEECH,
    SPEECH_PCM,
    SPEECH_SCRIPT,
    TEXT_SCRIPT,
    Connection,
    FakeOrchestrator,
    audio_of,
    client_of,
    deltas_of,
    error_of,
    events_of,
    limited,
    post,
)
from triptych.connectors.wire import TokenLogprob
from triptych.errors import CapacityError, ContextLengthError, DeadlineError, StageError
from triptych.models.qwen3_omni.processor import Processor
from triptych.pipeline.health import ProcessState
from triptych.pipeline.request import AudioDelta, Done, TextDelta
from triptych.server import audio, chat, completion

# --- whole answers ---


async def test_text_answer_is_one_choice_and_never_speaks(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator
) -> None:
    response = await post(client, BASE)
    body = response.json()
    assert response.status_code == 200 and response.headers["x-request-id"] == body["id"]
    assert body["object"] == "chat.completion" and body["model"] == "omni"
    [choice] = body["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert body["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "total_tokens": 12,
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "text_tokens": 9,
            "audio_tokens": 0,
            "image_tokens": 0,
            "video_tokens": 0,
        },
        "completion_tokens_details": {"reasoning_tokens": 0, "text_tokens": 3, "audio_tokens": 0},
    }
    [request] = pipeline.submitted
    assert request.talker is None and request.request_id == body["id"]


async def test_text_and_audio_share_one_choice(client: httpx.AsyncClient, pipeline: FakeOrchestrator) -> None:
    pipeline.script = SPEECH_SCRIPT
    body = (await post(client, SPEECH)).json()
    [choice] = body["choices"]
    message = choice["message"]
    assert message["content"] == message["audio"]["transcript"] == "Hello."
    assert base64.b64decode(message["audio"]["data"]) == SPEECH_PCM
    assert message["audio"]["id"].startswith("audio_")
    assert message["audio"]["expires_at"] == body["created"] + DEPLOY.audio_id_lifetime_s
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0, "text_tokens": 3, "audio_tokens": 3}
    assert pipeline.submitted[0].voice == "ethan"


async def test_audio_alone_has_null_content_and_its_transcript(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator
) -> None:
    pipeline.script = SPEECH_SCRIPT
    [choice] = (await post(client, BASE | {"modalities": ["audio"]})).json()["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["audio"]["transcript"] == "Hello."
    data = base64.b64decode(choice["message"]["audio"]["data"])
    assert data[:4] == b"RIFF" and data[44:] == SPEECH_PCM  # WAV is the default
    assert pipeline.submitted[0].voice is None  # the model's own default


@pytest.mark.parametrize(
    ("audio_format", "magic"),
    [("wav", b"RIFF"), ("flac", b"fLaC"), ("opus", b"OggS"), ("mp3", b"ID3"), ("aac", b"\xff\xf1")],
)
async def test_audio_comes_in_the_format_asked_for(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator, audio_format: str, magic: bytes
) -> None:
    pipeline.script = SPEECH_SCRIPT
    body = (await post(client, SPEECH | {"audio": {"format": audio_format}})).json()
    assert base64.b64decode(body["choices"][0]["message"]["audio"]["data"]).startswith(magic)


async def test_logprobs_have_openais_shape(client: httpx.AsyncClient, pipeline: FakeOrchestrator) -> None:
    entry = TokenLogprob(token_id=72, logprob=-0.25, top=((72, -0.25), (73, float("-inf"))))
    pipeline.script = [
        TextDelta(text="Hi", num_tokens=1, logprobs=(entry,), finish_reason="length"),
        Done(finish_reason="length", prompt_tokens=9, text_tokens=1, audio_frames=0),
    ]
    [choice] = (await post(client, BASE | {"logprobs": True, "top_logprobs": 2})).json()["choices"]
    assert choice["finish_reason"] == "length"
    [content] = choice["logprobs"]["content"]
    assert set(content) == {"token", "bytes", "logprob", "top_logprobs"}
    assert content["logprob"] == -0.25 and content["top_logprobs"][1]["logprob"] == -9999.0
    assert bytes(content["bytes"]).decode() == content["token"]
    assert pipeline.submitted[0].thinker.logprobs == 2
    chunks = events_of(await post(client, BASE | {"logprobs": True, "stream": True}))
    assert chunks[1]["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.25
    assert chunks[0]["choices"][0]["logprobs"] is None


async def test_sampling_fields_reach_the_thinker_and_only_it(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator
) -> None:
    fields = {
        "max_completion_tokens": 8,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -100},
        "stop": "\n",
        "seed": 11,
        "ignore_eos": True,
    }
    assert (await post(client, SPEECH | fields)).status_code == 200
    [request] = pipeline.submitted
    thinker, talker = request.thinker, request.talker
    assert talker is not None
    assert (thinker.max_tokens, thinker.temperature, thinker.top_p, thinker.top_k, thinker.min_p) == (8, 0, 0.5, 0, 0.1)
    assert (thinker.presence_penalty, thinker.frequency_penalty, thinker.repetition_penalty) == (1, -1, 1.2)
    assert (thinker.logit_bias, thinker.stop, thinker.ignore_eos) == ({5: -100.0}, ("\n",), True)
    assert talker == msgspec.structs.replace(talker, temperature=0.9, max_tokens=None, top_p=1.0, ignore_eos=False)
    assert thinker.seed == talker.seed == 11


async def test_each_stage_has_its_own_sampling_params(client: httpx.AsyncClient, pipeline: FakeOrchestrator) -> None:
    stages = [{"temperature": 0.5}, {"temperature": 0.7, "top_k": 9, "seed": 3}, {}]
    assert (await post(client, SPEECH | {"sampling_params_list": stages, "seed": 1})).status_code == 200
    [request] = pipeline.submitted
    assert request.talker is not None
    assert (request.thinker.temperature, request.thinker.seed) == (0.5, 1)
    assert (request.talker.temperature, request.talker.top_k, request.talker.seed) == (0.7, 9, 3)


async def test_developer_message_is_a_system_message(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator, processor: Processor
) -> None:
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "x"}]
    await post(client, BASE | {"messages": messages})
    expected = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "x"}]
    assert pipeline.submitted[0].prompt_token_ids == processor.encode(expected)


# --- streams ---


async def test_speech_stream_is_golden(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.server.completion.secrets.token_hex", lambda n: "abab")
    monkeypatch.setattr("triptych.server.completion.time.time", lambda: 1000.5)
    pipeline.script = SPEECH_SCRIPT
    response = await post(client, SPEECH | {"stream": True, "stream_options": {"include_usage": True}})

    def chunk(choice: str, usage: str = "null") -> str:
        return (
            f'{{"usage":{usage},"id":"chatcmpl-abab","object":"chat.completion.chunk","created":1000,"model":"omni",'
            f'"system_fingerprint":"{completion.FINGERPRINT}","choices":[{choice}]}}'
        )

    def delta(delta: str, finish: str = "null") -> str:
        return chunk(f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}')

    usage = (
        '{"prompt_tokens":9,"completion_tokens":6,"total_tokens":15,'
        '"prompt_tokens_details":{"cached_tokens":0,"text_tokens":9,"audio_tokens":0,"image_tokens":0,"video_tokens":0},'
        '"completion_tokens_details":{"reasoning_tokens":0,"text_tokens":3,"audio_tokens":3}}'
    )
    golden = [
        delta('{"role":"assistant","content":""}'),
        delta('{"content":"Hel","audio":{"id":"audio_abab","transcript":"Hel"}}'),
        delta('{"audio":{"data":"AAAAQADA"}}'),
        delta('{"content":"lo.","audio":{"transcript":"lo."}}'),
        delta('{"audio":{"data":"/38BgA=="}}'),
        delta('{"audio":{"expires_at":4600}}'),
        delta("{}", '"stop"'),
        chunk("", usage),
        "[DONE]",
    ]
    assert response.text == "".join(f"data: {line}\n\n" for line in golden)
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"


async def test_an_event_is_one_line_whatever_its_text(client: httpx.AsyncClient, pipeline: FakeOrchestrator) -> None:
    text = "".join(map(chr, [*range(0x100), *range(0x2000, 0x2100), 0xFEFF, 0x1F389]))
    pipeline.script = [TextDelta(text=text, num_tokens=1), TEXT_SCRIPT[-1]]
    lines = (await post(client, BASE | {"stream": True})).text.splitlines()  # as httpx's iter_lines does, too
    assert all(line.startswith("data: ") for line in lines if line)
    assert json.loads(lines[2].removeprefix("data: "))["choices"][0]["delta"] == {"content": text}


async def test_text_stream_has_no_audio_and_no_usage_unless_asked(client: httpx.AsyncClient) -> None:
    events = events_of(await post(client, BASE | {"stream": True}))
    assert events[-1] == "[DONE]"
    assert deltas_of(events) == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo."}, {}]
    assert all("usage" not in event for event in events[:-1])
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, None, "stop"]


async def test_audio_only_stream_has_null_content_and_a_transcript(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator
) -> None:
    pipeline.script = SPEECH_SCRIPT
    deltas = deltas_of(events_of(await post(client, SPEECH | {"stream": True, "modalities": ["audio"]})))
    assert deltas[0] == {"role": "assistant", "content": None}
    assert all("content" not in delta for delta in deltas[1:])
    assert "".join(delta.get("audio", {}).get("transcript", "") for delta in deltas) == "Hello."
    assert sum("id" in delta.get("audio", {}) for delta in deltas) == 1


@pytest.mark.parametrize("audio_format", audio.FORMATS)
async def test_streamed_pieces_join_to_what_the_whole_answer_holds(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator, audio_format: str
) -> None:
    wave = (0.4 * np.sin(np.arange(24000) / 9)).astype("<f4")
    chunks = np.split(wave, range(1365, 24000, 1920))
    pipeline.script = [
        *(AudioDelta(samples=chunk.tobytes(), num_frames=1, final=False) for chunk in chunks),
        Done(finish_reason="stop", prompt_tokens=1, text_tokens=1, audio_frames=len(chunks)),
    ]
    body = SPEECH | {"audio": {"format": audio_format}}
    whole = base64.b64decode((await post(client, body)).json()["choices"][0]["message"]["audio"]["data"])
    pieces = audio_of(events_of(await post(client, body | {"stream": True})))
    joined = b"".join(pieces)
    assert len(pieces) > 2
    if audio_format == "pcm16":
        assert joined == whole and all(len(piece) % 2 == 0 for piece in pieces)
    elif audio_format == "wav":
        assert joined.count(b"RIFF") == 1 and joined[44:] == whole[44:] and joined[4:8] == b"\xff" * 4
    else:
        assert joined[:2] == whole[:2] or audio_format == "mp3"
        assert abs(len(joined) - len(whole)) < 0.2 * len(whole) + 400


async def test_reply_without_any_audio_still_ends_properly(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator
) -> None:
    pipeline.script = [Done(finish_reason="length", prompt_tokens=1, text_tokens=0, audio_frames=0)]
    deltas = deltas_of(events_of(await post(client, SPEECH | {"stream": True})))
    assert [list(delta.get("audio", {})) for delta in deltas] == [[], ["id"], ["expires_at"], []]
    wav = audio_of(events_of(await post(client, SPEECH | {"stream": True, "audio": {"format": "wav"}})))
    assert [len(piece) for piece in wav] == [44]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StageError("it died", "talker", "r1", status=503), "service_unavailable"),
        (StageError("it failed", "talker"), "server_error"),
        (DeadlineError("too slow", "talker"), "timeout"),
        (RuntimeError("a secret of the server"), "server_error"),
    ],
)
async def test_failure_in_a_stream_is_an_error_event_and_never_a_clean_end(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator, error: Exception, kind: str
) -> None:
    pipeline.script = [*SPEECH_SCRIPT[:2], error]
    events = events_of(await post(client, SPEECH | {"stream": True}))
    assert events[-1]["error"]["type"] == kind and "secret" not in events[-1]["error"]["message"]
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])


async def test_stream_that_stops_without_a_result_is_an_error(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator
) -> None:
    pipeline.script = SPEECH_SCRIPT[:3]
    events = events_of(await post(client, SPEECH | {"stream": True}))
    assert "without a result" in events[-1]["error"]["message"]
    error_of(await post(client, SPEECH), 500)


async def test_encoder_failure_ends_the_stream_with_an_error_and_frees_the_request(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, data: Any) -> bytes:
        raise OSError("disk on fire")

    monkeypatch.setattr(audio.PCMEncoder, "encode", broken)
    pipeline.script = SPEECH_SCRIPT
    events = events_of(await post(client, SPEECH | {"stream": True}))
    assert events[-1]["error"]["type"] == "server_error"
    assert pipeline.streams[0].aborted.is_set()
    assert 'outcome="failed"} 1.0' in (await client.get("/metrics")).text


async def test_an_encoder_that_cannot_be_made_frees_the_request(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> audio.Encoder:
        raise MemoryError

    monkeypatch.setattr(chat, "make_encoder", broken)
    pipeline.script = SPEECH_SCRIPT
    error_of(await post(client, SPEECH), 500)
    assert all(stream.aborted.is_set() for stream in pipeline.streams)
    assert 'outcome="failed"} 1.0' in (await client.get("/metrics")).text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (CapacityError("full", retry_after=7), 429, "7"),
        (CapacityError("restarting", retry_after=3, status=503), 503, "3"),
        (ContextLengthError("too long"), 400, None),
        (StageError("it died", "thinker", "r", status=503), 503, "5"),
        (StageError("it broke", "thinker"), 500, None),
        (DeadlineError("too slow", "talker"), 504, None),
        (RuntimeError("a secret"), 500, None),
    ],
)
async def test_failure_before_the_first_event_has_its_own_status(
    client: httpx.AsyncClient,
    pipeline: FakeOrchestrator,
    stream: bool,
    error: Exception,
    status: int,
    retry_after: str | None,
) -> None:
    if isinstance(error, CapacityError | ContextLengthError):
        pipeline.refusal = error
    else:
        pipeline.script = [error]
    response = await post(client, BASE | {"stream": stream})
    body = error_of(response, status)
    assert response.headers.get("retry-after") == retry_after
    assert "secret" not in body["message"]
    if isinstance(error, StageError | DeadlineError):
        assert "thinker" in body["message"] or "talker" in body["message"]


# --- requests that are wrong ---


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"modalities": ["audio"], "audio": {"voice": "alloy"}}, "audio.voice"),
        ({"modalities": ["audio"], "speaker": "nope"}, "speaker"),
        ({"modalities": ["audio"], "voice": ""}, "voice"),
        ({"modalities": ["audio"], "audio": {"voice": ""}}, "audio.voice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"messages": [{"role": "tool", "tool_call_id": "1", "content": "5"}]}, "messages.0.role"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"n": 2}, "n"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages.0.content.0.input_audio.data",
        ),
        ({"logit_bias": {"1500": 1}}, "logit_bias"),
        ({"sampling_params_list": [{"logit_bias": {"1500": 1}}]}, "sampling_params_list.0.logit_bias"),
        ({"sampling_params_list": [{"stop_token_ids": [-1]}]}, "sampling_params_list.0.stop_token_ids"),
        (
            {"modalities": ["audio"], "sampling_params_list": [{}, {"logit_bias": {"-1": 1}}]},
            "sampling_params_list.1.logit_bias.-1",
        ),
        ({"stop_token_ids": [5] * 1501}, "stop_token_ids"),
    ],
)
async def test_wrong_field_is_named_before_any_model_work(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator, change: dict[str, Any], param: str
) -> None:
    error = error_of(await post(client, BASE | change), 400)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    unknown = {"unknown_parameter", "unsupported_parameter", "missing_required_parameter"}
    assert error["code"] in unknown | {"invalid_value"}
    assert not pipeline.submitted


async def test_voice_error_lists_the_voices(client: httpx.AsyncClient) -> None:
    error = error_of(await post(client, SPEECH | {"audio": {"voice": "alloy"}}), 400)
    assert "chelsie, ethan" in error["message"]


async def test_audio_without_speech_stages_is_refused(
    make_app: Callable[..., FastAPI], pipeline: FakeOrchestrator
) -> None:
    deploy = msgspec.structs.replace(DEPLOY, stages=DEPLOY.stages[:1])
    async with client_of(make_app(deploy=deploy)) as client:
        error = error_of(await post(client, SPEECH), 400)
        assert "this server has no speech stages" in error["message"] and error["param"] == "modalities"
        assert (await post(client, BASE)).status_code == 200
        assert (await client.get("/v1/audio/voices")).json()["voices"] == []
    assert len(pipeline.submitted) == 1


async def test_format_that_the_build_cannot_encode_is_refused(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.server.chat.encodable", lambda name: name != "opus")
    error = error_of(await post(client, SPEECH | {"audio": {"format": "opus"}}), 400)
    assert error["param"] == "audio.format" and "wav" in error["message"] and not pipeline.submitted


async def test_unknown_model_is_404_and_an_alias_is_served(make_app: Callable[..., FastAPI]) -> None:
    async with client_of(make_app(model_aliases=["default"])) as client:
        error = error_of(await post(client, BASE | {"model": "gpt"}), 404)
        assert error["code"] == "model_not_found" and error["param"] == "model"
        assert (await post(client, BASE | {"model": "default"})).json()["model"] == "default"


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {"content-type": "application/json"}, 400),
        (b"[]", {"content-type": "application/json; charset=utf-8"}, 400),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {}, 415),
        (b"{}", {"content-type": "application/json", "content-encoding": "gzip"}, 415),
        (b"x" * 2001, {"content-type": "application/json"}, 413),
    ],
)
async def test_body_that_is_not_usable_json_is_refused(
    make_app: Callable[..., FastAPI], content: bytes, headers: dict[str, str], status: int
) -> None:
    async with client_of(make_app(deploy=limited(max_body_bytes=2000))) as client:
        error_of(await client.post("/v1/chat/completions", content=content, headers=headers), status)


async def test_a_body_without_a_content_type_is_told_which(make_app: Callable[..., FastAPI]) -> None:
    async with client_of(make_app()) as client:
        error = error_of(await client.post("/v1/chat/completions", content=b"{}"), 415)
        assert error["message"] == "the request has no content type; send 'application/json'"


async def test_long_body_is_refused_while_it_is_read(make_app: Callable[..., FastAPI]) -> None:
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b" " * 1000

    async with client_of(make_app(deploy=limited(max_body_bytes=10_000))) as client:
        headers = {"content-type": "application/json"}
        error_of(await client.post("/v1/chat/completions", content=endless(), headers=headers), 413)
    assert taken <= 12


async def test_unknown_route_and_method_have_openais_error_body(client: httpx.AsyncClient) -> None:
    error = error_of(await client.get("/v1/nothing"), 404)
    assert "GET /v1/nothing" in error["message"] and "POST /v1/chat/completions" in error["message"]
    assert error["code"] == "path_not_found"
    response = await client.get("/v1/chat/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


# --- the API key ---


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic secret", "Bearer", "secret", "Bearer s\xe9cret"])
async def test_request_without_the_key_is_401(
    make_app: Callable[..., FastAPI], pipeline: FakeOrchestrator, header: str | None
) -> None:
    headers = {b"authorization": header.encode("latin-1")} if header else {}
    async with client_of(make_app(api_key="secret")) as client:
        for path in ("/v1/chat/completions", "/chat/completions"):
            response = await client.post(path, json=BASE, headers=headers)
            assert error_of(response, 401)["code"] == "invalid_api_key"
        error_of(await client.get("/v1/models", headers=headers), 401)
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200
    assert not pipeline.submitted


async def test_request_with_the_key_is_served(make_app: Callable[..., FastAPI]) -> None:
    async with client_of(make_app(api_key="secret"), headers={"authorization": "bearer secret"}) as client:
        assert (await post(client, BASE)).status_code == 200


# --- other routes ---


async def test_lists_answer_with_and_without_the_prefix(client: httpx.AsyncClient) -> None:
    for prefix in ("/v1", ""):
        models = (await client.get(f"{prefix}/models")).json()
        assert models["object"] == "list" and models["data"][0]["id"] == "omni"
        assert (await client.get(f"{prefix}/models/omni")).json() == models["data"][0]
        assert error_of(await client.get(f"{prefix}/models/some/other"), 404)["code"] == "model_not_found"
        assert (await client.get(f"{prefix}/audio/models")).json()["models"] == [{"id": "omni"}]
        voices = (await client.get(f"{prefix}/audio/voices")).json()
        assert [voice["id"] for voice in voices["voices"]] == ["chelsie", "ethan"]
        assert (await post(client, BASE, f"{prefix}/chat/completions")).status_code == 200


@pytest.mark.parametrize(
    ("age", "state", "health", "ready"),
    [
        (0.5, ProcessState.READY, 200, 200),
        (31.0, ProcessState.READY, 503, 200),
        (None, ProcessState.RESTARTING, 503, 503),
        (0.5, ProcessState.RESTARTING, 200, 503),
        (0.5, ProcessState.FAILED, 503, 503),
    ],
)
async def test_health_wants_fresh_heartbeats_and_readiness_wants_ready_stages(
    client: httpx.AsyncClient,
    pipeline: FakeOrchestrator,
    age: float | None,
    state: ProcessState,
    health: int,
    ready: int,
) -> None:
    pipeline.heartbeat_age_s, pipeline.state = age, state
    response = await client.get("/health")
    assert response.status_code == health
    assert set(response.json()["stages"]) == {"thinker", "talker", "code2wav"}
    assert response.json()["stages"]["talker"]["process"] == "speech"
    assert (await client.get("/ready")).status_code == ready


async def test_metrics_count_what_was_served(client: httpx.AsyncClient, pipeline: FakeOrchestrator) -> None:
    await post(client, BASE)
    pipeline.script = SPEECH_SCRIPT
    await post(client, SPEECH | {"stream": True})
    await post(client, BASE | {"n": 3})
    pipeline.refusal = CapacityError("full")
    await post(client, BASE)
    text = (await client.get("/metrics")).text
    for line in (
        'triptych:requests_total{model_name="omni",outcome="stop"} 2.0',
        'triptych:requests_total{model_name="omni",outcome="refused"} 1.0',
        'triptych:requests_total{model_name="omni",outcome="overloaded"} 1.0',
        'triptych:requests_total{model_name="omni",outcome="failed"} 0.0',
        'triptych:prompt_tokens_total{model_name="omni"} 18.0',
        'triptych:generation_tokens_total{model_name="omni"} 6.0',
        'triptych:audio_frames_total{model_name="omni"} 3.0',
        'triptych:time_to_first_token_s_count{model_name="omni"} 2.0',
        'triptych:audio_ttfp_s_count{model_name="omni"} 1.0',
        'triptych:audio_rtf_count{model_name="omni"} 1.0',
        'triptych:num_requests_running{model_name="omni"} 3.0',
        'triptych:num_requests_waiting{model_name="omni"} 1.0',
        'triptych:stage_running_requests{model_name="omni",replica="0",stage="thinker"} 3.0',
        'triptych:stage_tokens_total{model_name="omni",replica="0",stage="thinker"} 77.0',
    ):
        assert line in text.splitlines(), line


async def test_openapi_describes_the_request(client: httpx.AsyncClient) -> None:
    text = (await client.get("/openapi.json")).text
    operation = json.loads(text)["paths"]["/v1/chat/completions"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "messages", "modalities", "audio"} <= set(schema["properties"]) and "$defs" not in text


# --- clients that leave ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("events_before", [0, 1, 2])
async def test_client_that_leaves_aborts_its_request_at_once(
    make_app: Callable[..., FastAPI], pipeline: FakeOrchestrator, stream: bool, events_before: int
) -> None:
    never = asyncio.Event()
    pipeline.script = [*SPEECH_SCRIPT[:events_before], never]
    app = make_app()
    connection = Connection(app, SPEECH | {"stream": stream})
    for _ in range(events_before + 2 if stream and events_before else 0):  # start, role, and the events
        assert (await connection.read())["type"].startswith("http.response")
    while not pipeline.streams:
        await asyncio.sleep(0.001)
    connection.leave()
    await asyncio.wait_for(pipeline.streams[0].aborted.wait(), 5)
    with contextlib.suppress(asyncio.QueueEmpty):
        connection.outgoing.get_nowait()
    drain = asyncio.create_task(connection.read())
    await connection.ended()
    drain.cancel()
    async with client_of(app) as client:
        assert 'outcome="disconnected"} 1.0' in (await client.get("/metrics")).text


async def test_client_that_stops_reading_and_leaves_aborts_its_request(
    make_app: Callable[..., FastAPI], pipeline: FakeOrchestrator
) -> None:
    pipeline.script = SPEECH_SCRIPT
    connection = Connection(make_app(), SPEECH | {"stream": True})
    await connection.read()
    await asyncio.sleep(0.05)  # the server is now stuck in `send`
    assert not pipeline.streams[0].ended
    connection.leave()
    await asyncio.wait_for(pipeline.streams[0].aborted.wait(), 5)
    await connection.ended()


async def test_stop_of_the_server_aborts_what_is_streamed(
    make_app: Callable[..., FastAPI], pipeline: FakeOrchestrator
) -> None:
    pipeline.script = [SPEECH_SCRIPT[0], asyncio.Event()]
    connection = Connection(make_app(), SPEECH | {"stream": True})
    for _ in range(3):
        await connection.read()
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    assert pipeline.streams[0].aborted.is_set()


# --- the official client over a real socket ---


@pytest.fixture
async def base_url(make_app: Callable[..., FastAPI]) -> AsyncIterator[str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(api_key="secret"), log_config=None, lifespan="off"))
    server.config.load()
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server.should_exit = True
    await task
    listener.close()


@pytest.fixture
async def sdk(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="secret", max_retries=0) as sdk:
        yield sdk


async def test_official_client_reads_a_spoken_answer(sdk: openai.AsyncOpenAI, pipeline: FakeOrchestrator) -> None:
    pipeline.script = SPEECH_SCRIPT
    answer = await sdk.chat.completions.create(
        model="omni",
        messages=[{"role": "user", "content": "hi"}],
        modalities=["text", "audio"],
        audio={"voice": "Ethan", "format": "pcm16"},
    )
    message = answer.choices[0].message
    assert len(answer.choices) == 1 and message.audio is not None and answer.usage is not None
    assert message.content == message.audio.transcript == "Hello."
    assert base64.b64decode(message.audio.data) == SPEECH_PCM
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.audio_tokens == 3


async def test_official_client_reads_a_spoken_stream(sdk: openai.AsyncOpenAI, pipeline: FakeOrchestrator) -> None:
    pipeline.script = SPEECH_SCRIPT
    text, data, audio_ids, finish = "", b"", [], []
    usage = None
    stream = await sdk.chat.completions.create(
        model="omni",
        messages=[{"role": "user", "content": "hi"}],
        modalities=["text", "audio"],
        audio={"voice": "ethan", "format": "pcm16"},
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            update: Any = choice.delta.to_dict().get("audio", {})  # a type of its own, or an extra field, by version
            data += base64.b64decode(update.get("data", ""))
            audio_ids += [update["id"]] if "id" in update else []
            finish += [choice.finish_reason] if choice.finish_reason else []
    assert (text, data, len(audio_ids), finish) == ("Hello.", SPEECH_PCM, 1, ["stop"])
    assert usage is not None and usage.total_tokens == 15


async def test_official_client_raises_its_own_errors(sdk: openai.AsyncOpenAI, pipeline: FakeOrchestrator) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.chat.completions.create(model="other", messages=messages)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.chat.completions.create(model="omni", messages=messages, n=2)
    assert bad.value.param == "n"
    with pytest.raises(openai.AuthenticationError):
        await sdk.with_options(api_key="wrong").chat.completions.create(model="omni", messages=messages)
    pipeline.refusal = CapacityError("full")
    with pytest.raises(openai.RateLimitError):
        await sdk.chat.completions.create(model="omni", messages=messages)
    pipeline.refusal = None
    pipeline.script = [TEXT_SCRIPT[0], StageError("it died", "thinker", status=503)]
    stream = await sdk.chat.completions.create(model="omni", messages=messages, stream=True)
    with pytest.raises(openai.APIError, match="it died"):
        async for _ in stream:
            pass


async def test_official_client_replays_its_history(sdk: openai.AsyncOpenAI, pipeline: FakeOrchestrator) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    answer = await sdk.chat.completions.create(model="omni", messages=messages)
    messages += [answer.choices[0].message, {"role": "user", "content": "again"}]
    await sdk.chat.completions.create(model="omni", messages=messages)
    assert len(pipeline.submitted[1].prompt_token_ids) > len(pipeline.submitted[0].prompt_token_ids)


async def test_official_client_lists_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == ["omni"]


async def test_closed_socket_aborts_the_request(base_url: str, pipeline: FakeOrchestrator) -> None:
    pipeline.script = [SPEECH_SCRIPT[0], asyncio.Event()]
    headers = {"authorization": "Bearer secret"}
    for stream in (True, False):
        pipeline.streams.clear()
        async with httpx.AsyncClient(headers=headers) as client:
            body = SPEECH | {"stream": stream}
            asking = asyncio.create_task(
                client.send(client.build_request("POST", f"{base_url}/chat/completions", json=body))
            )
            while not pipeline.streams:
                await asyncio.sleep(0.005)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(pipeline.streams[0].aborted.wait(), 5)


def test_server_imports_no_torch() -> None:
    code = "import sys, triptych.server.app; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
