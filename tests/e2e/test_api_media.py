"""Media in the HTTP API over a scripted loader: what is asked of it, and that nothing it holds is ever kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from tests.fake_pipeline import (
    BASE,
    DEPLOY,
    SPEECH,
    SPEECH_SCRIPT,
    Connection,
    FakeLoader,
    FakeOrchestrator,
    client_of,
    deltas_of,
    error_of,
    events_of,
    limited,
    post,
)
from triptych.errors import CapacityError, ContextLengthError, RequestError
from triptych.media.contract import MediaOptions
from triptych.models.qwen3_omni.config import OmniConfig
from triptych.models.qwen3_omni.processor import Processor
from triptych.pipeline.request import Done, MediaTokens

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
VIDEO = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}
TEXT = {"type": "text", "text": "What is this?"}


def asking(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return BASE | {"messages": [{"role": "user", "content": list(parts)}]} | fields


# --- what reaches loader and pipeline ---


async def test_parts_reach_the_loader_in_order_and_the_prompt_in_place(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator, loader: FakeLoader, config: OmniConfig
) -> None:
    earlier = [{"role": "user", "content": [IMAGE, TEXT]}, {"role": "assistant", "content": "A cat."}]
    messages = [*earlier, {"role": "user", "content": [AUDIO, TEXT, VIDEO]}]
    options = {"use_audio_in_video": True, "mm_processor_kwargs": {"fps": 1}}
    assert (await post(client, BASE | {"messages": messages} | options)).status_code == 200
    [(parts, asked)] = loader.asked
    assert [part.param for part in parts] == ["messages.0.content.0", "messages.2.content.0", "messages.2.content.2"]
    assert [part.kind for part in parts] == ["image", "audio", "video"]
    assert asked == MediaOptions(use_audio_in_video=True, fps=1.0)
    [request] = pipeline.submitted
    assert [item.kind for item in request.media] == ["image", "audio", "video", "audio"]
    ids = request.prompt_token_ids
    counts = {kind: ids.count(getattr(config, f"{kind}_token_id")) for kind in ("audio", "image", "video")}
    assert counts == {"audio": 26, "image": 4, "video": 8}
    assert request.media_tokens == MediaTokens(**counts)
    assert request.lease is loader.leases[0] and loader.leases[0].closed == 0  # the pipeline's, from then on


@pytest.mark.parametrize("body", [BASE, BASE | {"use_audio_in_video": True, "mm_processor_kwargs": {"fps": 2}}])
async def test_text_alone_asks_nothing_of_the_loader(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator, loader: FakeLoader, body: dict[str, Any]
) -> None:
    assert (await post(client, body)).status_code == 200
    assert not loader.asked and pipeline.submitted[0].lease is None


async def test_usage_tells_the_kinds_of_tokens_apart(client: httpx.AsyncClient, pipeline: FakeOrchestrator) -> None:
    tokens = MediaTokens(audio=13, image=4, video=8)
    pipeline.script = [Done(finish_reason="stop", prompt_tokens=40, text_tokens=0, audio_frames=0, media_tokens=tokens)]
    expected = {"cached_tokens": 0, "text_tokens": 15, "audio_tokens": 13, "image_tokens": 4, "video_tokens": 8}
    assert (await post(client, asking(IMAGE))).json()["usage"]["prompt_tokens_details"] == expected
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    events = events_of(await post(client, asking(IMAGE, **stream)))
    assert events[-2]["usage"]["prompt_tokens_details"] == expected
    metrics = (await client.get("/metrics")).text
    assert 'triptych:media_tokens_total{kind="image",model_name="omni"} 8.0' in metrics
    assert 'triptych:media_decoded_total{model_name="omni"} 2.0' in metrics


async def test_the_deadline_counts_from_the_arrival(client: httpx.AsyncClient, pipeline: FakeOrchestrator) -> None:
    before = asyncio.get_running_loop().time()
    await post(client, asking(IMAGE))
    arrival = pipeline.submitted[0].arrival
    assert arrival is not None and before <= arrival <= asyncio.get_running_loop().time()


# --- nothing is kept, however a request ends ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (ContextLengthError("too long"), 400),
        (CapacityError("full"), 429),
        (RuntimeError("a bug"), 500),
    ],
)
async def test_a_request_that_the_pipeline_refuses_lets_go_of_its_media_once(
    client: httpx.AsyncClient,
    pipeline: FakeOrchestrator,
    loader: FakeLoader,
    stream: bool,
    refusal: Exception,
    status: int,
) -> None:
    pipeline.refusal = refusal
    error_of(await post(client, asking(IMAGE, AUDIO, stream=stream)), status)
    assert [lease.closed for lease in loader.leases] == [1]


async def test_a_prompt_that_does_not_fit_lets_go_of_its_media_once(
    make_app: Callable[..., FastAPI], pipeline: FakeOrchestrator, loader: FakeLoader
) -> None:
    stage = msgspec.structs.replace(DEPLOY.stages[0], max_model_len=20)
    deploy = msgspec.structs.replace(DEPLOY, stages=(stage, *DEPLOY.stages[1:]))
    async with client_of(make_app(deploy=deploy)) as client:
        error = error_of(await post(client, asking(VIDEO, AUDIO)), 400)
    assert error["code"] == "context_length_exceeded" and not pipeline.submitted
    assert [lease.closed for lease in loader.leases] == [1]


@pytest.mark.parametrize(
    ("refusal", "status", "param"),
    [
        (RequestError("not an image", "messages.0.content.1", "bad"), 400, "messages.0.content.1"),
        (CapacityError("too many wait", retry_after=3, status=503), 503, None),
        (TimeoutError("not the deadline"), 500, None),
    ],
)
async def test_what_the_loader_refuses_is_the_answer(
    client: httpx.AsyncClient,
    pipeline: FakeOrchestrator,
    loader: FakeLoader,
    refusal: Exception,
    status: int,
    param: str | None,
) -> None:
    loader.refusal = refusal
    assert error_of(await post(client, asking(TEXT, IMAGE, stream=True)), status)["param"] == param
    assert not pipeline.submitted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modalities": ["audio"], "audio": {"voice": "nope"}}, "audio.voice"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "a " * 10**6}]}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}, {"role": "assistant", "audio": {"id": "audio_x"}}]},
            "messages.1.audio.id",
        ),
    ],
)
async def test_what_is_wrong_beside_the_media_is_found_before_it_is_loaded(
    client: httpx.AsyncClient, loader: FakeLoader, fields: dict[str, Any], param: str
) -> None:
    assert error_of(await post(client, asking(IMAGE) | fields), 400)["param"] == param
    assert not loader.asked


async def test_a_full_server_loads_nothing(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator, loader: FakeLoader
) -> None:
    pipeline.full = True
    error_of(await post(client, asking(IMAGE)), 429)
    assert not loader.asked


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_its_media_is_loaded_stops_that(
    make_app: Callable[..., FastAPI], pipeline: FakeOrchestrator, loader: FakeLoader, stream: bool
) -> None:
    loader.gate = asyncio.Event()
    app = make_app()
    connection = Connection(app, asking(IMAGE, stream=stream))
    await asyncio.wait_for(loader.loading.wait(), 5)
    connection.leave()
    await asyncio.wait_for(loader.cancelled.wait(), 5)
    drain = asyncio.create_task(connection.read())
    await connection.ended()
    drain.cancel()
    assert not pipeline.submitted and not loader.leases
    async with client_of(app) as client:
        assert 'outcome="disconnected"} 1.0' in (await client.get("/metrics")).text


async def test_a_stop_in_the_moment_that_the_media_is_there_loses_none(
    make_app: Callable[..., FastAPI], loader: FakeLoader
) -> None:
    """The loader has just answered and nobody has taken its answer yet."""
    loader.gate = asyncio.Event()
    connection = Connection(make_app(), asking(IMAGE))
    await asyncio.wait_for(loader.loading.wait(), 5)
    loader.gate.set()
    while not loader.leases:
        await asyncio.sleep(0)
    connection.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await connection.task
    assert [lease.closed for lease in loader.leases] == [1]


async def test_the_deadline_covers_loading(make_app: Callable[..., FastAPI], loader: FakeLoader) -> None:
    loader.gate = asyncio.Event()
    deploy = msgspec.structs.replace(DEPLOY, request_timeout_s=0.05)
    async with client_of(make_app(deploy=deploy)) as client:
        error = error_of(await post(client, asking(IMAGE)), 504)
    assert "media was still being loaded" in error["message"] and loader.cancelled.is_set()


async def test_the_limit_of_a_body_is_that_of_the_deploy_config(make_app: Callable[..., FastAPI]) -> None:
    file = {"type": "input_audio", "input_audio": {"data": "A" * 5_000_000, "format": "wav"}}
    for limit, status in ((6_000_000, 200), (4_000_000, 413)):
        async with client_of(make_app(deploy=limited(max_body_bytes=limit))) as client:
            assert (await post(client, asking(file))).status_code == status


async def test_large_bodies_share_a_bound_and_small_ones_are_let_in(
    make_app: Callable[..., FastAPI], loader: FakeLoader
) -> None:
    def large(size: int) -> dict[str, Any]:
        return asking({"type": "input_audio", "input_audio": {"data": "A" * size, "format": "wav"}})

    loader.gate = asyncio.Event()
    async with client_of(make_app(deploy=limited(max_body_bytes=3_000_000))) as client:
        held = [asyncio.create_task(post(client, large(2_900_000))) for _ in range(4)]
        while len(loader.asked) < 4:
            await asyncio.sleep(0.005)
        refused = await post(client, large(2_900_000))
        assert error_of(refused, 503)["code"] == "no_capacity" and refused.headers["retry-after"]
        assert (await post(client, BASE)).status_code == 200
        loader.gate.set()
        assert [(await answer).status_code for answer in held] == [200] * 4
        assert (await post(client, large(2_900_000))).status_code == 200


# --- what was said before ---


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_referred_to_by_its_audio_id(
    client: httpx.AsyncClient, pipeline: FakeOrchestrator, processor: Processor, stream: bool
) -> None:
    pipeline.script = SPEECH_SCRIPT
    answer = await post(client, SPEECH | {"stream": stream, "modalities": ["audio"]})
    if stream:
        [audio_id] = [delta["audio"]["id"] for delta in deltas_of(events_of(answer)) if "id" in delta.get("audio", {})]
        given = {"id": audio_id}
    else:
        given = answer.json()["choices"][0]["message"]["audio"]
    question = {"role": "user", "content": "Again?"}
    history = [*BASE["messages"], {"role": "assistant", "content": None, "audio": given}, question]
    assert (await post(client, BASE | {"messages": history})).status_code == 200
    said = [*BASE["messages"], {"role": "assistant", "content": "Hello."}, question]
    assert pipeline.submitted[-1].prompt_token_ids == processor.encode(said)


async def test_an_audio_id_that_has_expired_is_refused(
    make_app: Callable[..., FastAPI], pipeline: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.script = SPEECH_SCRIPT
    async with client_of(make_app()) as client:
        monkeypatch.setattr("triptych.server.completion.time.time", lambda: 1000.0)  # an hour and more ago
        audio = (await post(client, SPEECH)).json()["choices"][0]["message"]["audio"]
        monkeypatch.undo()
        history = [*BASE["messages"], {"role": "assistant", "audio": {"id": audio["id"]}}]
        error = error_of(await post(client, BASE | {"messages": history}), 400)
    assert error["param"] == "messages.1.audio.id" and error["code"] == "audio_not_found"
    assert audio["id"] in error["message"]
