"""Speech as clients of `triptych serve` get it: the same bytes however it is asked for, in OpenAI's shape, in time."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import subprocess
import sys
import time
import wave
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest

from tests.live_server import HEARTBEAT_S, LOAD_S, LiveServer, sse_events, wait_until
from triptych.models.qwen3_omni.config import load_config

PROMPT, SEED, MAX_TOKENS = "Tell me a story.", 7, 48
FORMATS = ("wav", "pcm16", "mp3", "flac", "opus", "aac")
FRAMES = 50  # 80 ms each
TAIL = 555  # samples that a reply is shorter than its frames
# 240 tokens of text and 4 s of speech, whatever the model would rather do.
LONG = [{"ignore_eos": True, "max_tokens": 240}, {"ignore_eos": True, "max_tokens": FRAMES}]


@dataclass
class Spoken:
    """One answer. `audio` is as it came; `order` has a letter for each delta of a stream, t(ext) or a(udio)."""

    content: str = ""
    transcript: str = ""
    audio: bytes = b""
    order: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def said(self) -> tuple[str, bytes]:
        return self.content, self.audio


def body(content: str = PROMPT, seed: int = SEED, audio_format: str = "pcm16", **fields: Any) -> dict[str, Any]:
    return {
        "model": "nano",
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "chelsie", "format": audio_format},
        "seed": seed,
        "max_tokens": MAX_TOKENS,
    } | fields


def long_body(**fields: Any) -> dict[str, Any]:
    return body(max_tokens=LONG[0]["max_tokens"], **fields) | {"sampling_params_list": LONG}


def from_whole(answer: dict[str, Any]) -> Spoken:
    [choice] = answer["choices"]
    audio = choice["message"]["audio"]
    return Spoken(
        content=choice["message"]["content"],
        transcript=audio["transcript"],
        audio=base64.b64decode(audio["data"]),
        finish_reason=choice["finish_reason"],
        usage=answer["usage"],
    )


def from_chunks(chunks: list[dict[str, Any]]) -> Spoken:
    spoken = Spoken()
    for chunk in chunks:
        assert "error" not in chunk, chunk
        spoken.usage = chunk.get("usage") or spoken.usage
        for choice in chunk["choices"]:
            audio = choice["delta"].get("audio") or {}
            spoken.content += choice["delta"].get("content") or ""
            spoken.transcript += audio.get("transcript") or ""
            spoken.audio += base64.b64decode(audio.get("data") or "")
            spoken.order += ("t" if audio.get("transcript") else "") + ("a" if audio.get("data") else "")
            spoken.finish_reason = choice["finish_reason"] or spoken.finish_reason
    return spoken


async def ask(client: httpx.AsyncClient, request: dict[str, Any]) -> Spoken:
    if not request.get("stream"):
        answer = await client.post("/v1/chat/completions", json=request)
        assert answer.status_code == 200, answer.text
        return from_whole(answer.json())
    async with client.stream("POST", "/v1/chat/completions", json=request) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line async for line in answer.aiter_lines()]
    assert "data: [DONE]" in lines
    return from_chunks(sse_events(lines))


@pytest.fixture(scope="module")
def server(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(nano, log=tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def openai_client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=LOAD_S) as client:
        yield client


# --- the same seed, the same bytes ---


def generate(model: Path, out: Path) -> tuple[str, bytes]:
    """Text and samples of `triptych generate`."""
    command = [sys.executable, "-m", "triptych", "generate", str(model), "--deploy-config", "tiny_cpu"]
    command += ["--prompt", PROMPT, "--seed", str(SEED), "--max-tokens", str(MAX_TOKENS), "--out", str(out)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LOAD_S)
    assert done.returncode == 0, done.stderr
    with wave.open(str(out)) as file:
        return done.stdout.removesuffix("\n"), file.readframes(file.getnframes())


async def test_one_seed_gives_the_same_bytes_by_command_over_http_alone_and_in_a_crowd(
    nano: Path, server: LiveServer, tmp_path: Path
) -> None:
    requests = [body()]
    requests += [
        body(seed=seed, content=f"{'Well, ' * seed}say {seed}.") for seed in range(1, 8)
    ]  # 16 requests at once, in the end
    crowd = [request | {"stream": stream} for request in requests for stream in (False, True)]
    command = asyncio.create_task(asyncio.to_thread(generate, nano, tmp_path / "answer.wav"))
    async with httpx.AsyncClient(base_url=server.url, timeout=LOAD_S) as client:
        alone = [await ask(client, request) for request in requests[:4]]
        together = await asyncio.gather(*(ask(client, request) for request in crowd))
    assert len(alone[0].content) > 20 and len(alone[0].audio) > 48000
    assert len({spoken.audio for spoken in together}) == len(requests), "each request should have its own answer"
    for whole, streamed in zip(together[::2], together[1::2], strict=True):
        assert whole.said == streamed.said
    assert [spoken.said for spoken in together[:8:2]] == [spoken.said for spoken in alone]
    assert await command == alone[0].said


# --- OpenAI's client ---


def test_the_openai_client_gets_the_same_answer_streamed_and_whole(openai_client: openai.OpenAI) -> None:
    create: Any = openai_client.chat.completions.create
    extra = {"extra_body": {"sampling_params_list": LONG}}
    request = {name: value for name, value in long_body().items() if name != "sampling_params_list"} | extra
    whole = from_whole(create(**request).to_dict())
    chunks = create(**request, stream=True, stream_options={"include_usage": True})
    streamed = from_chunks([chunk.to_dict() for chunk in chunks])
    assert streamed.said == whole.said
    assert whole.content == whole.transcript == streamed.transcript
    assert len(whole.audio) == 2 * (1920 * FRAMES - 555)
    assert streamed.order.index("a") < streamed.order.rindex("t"), "speech should begin while the text is being written"
    assert whole.finish_reason == streamed.finish_reason == "length"
    assert whole.usage == streamed.usage
    assert whole.usage["completion_tokens_details"]["audio_tokens"] == FRAMES


def decoded(audio: bytes, audio_format: str) -> Any:
    """Samples [n] at 24 kHz in [-1, 1]."""
    if audio_format == "pcm16":
        return np.frombuffer(audio, "<i2") / 32768
    with av.open(io.BytesIO(audio)) as container:
        resampler = av.AudioResampler(format="flt", layout="mono", rate=24000)
        frames = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)]
        return np.concatenate([frame.to_ndarray()[0] for frame in [*frames, *resampler.resample(None)]])


async def test_every_format_decodes_to_the_same_speech(server: LiveServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=LOAD_S) as client:
        plain = decoded((await ask(client, body())).audio, "pcm16")
        wanted = [(name, stream) for name in FORMATS for stream in (False, True)]
        answers = await asyncio.gather(
            *(ask(client, body(audio_format=name, stream=stream)) for name, stream in wanted)
        )
    for (name, _), spoken in zip(wanted, answers, strict=True):
        samples = decoded(spoken.audio, name)
        if name in ("wav", "pcm16", "flac"):
            np.testing.assert_allclose(samples, plain, atol=1e-6, err_msg=name)
        else:  # noise is the worst that can happen to such an encoder: only length and loudness are to be kept
            assert 0 <= len(samples) - len(plain) < 24000 // 4, name
            assert 0.5 < np.sqrt(np.mean(samples**2)) / np.sqrt(np.mean(plain**2)) < 1.5, name


async def test_audio_alone_carries_its_text_as_a_transcript_only(server: LiveServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=LOAD_S) as client:
        both = await ask(client, body())
        answer = await client.post("/v1/chat/completions", json=body(modalities=["audio"]))
        streamed = await ask(client, body(modalities=["audio"], stream=True))
    message = answer.json()["choices"][0]["message"]
    assert message["content"] is None and streamed.content == ""
    assert message["audio"]["transcript"] == streamed.transcript == both.content
    assert base64.b64decode(message["audio"]["data"]) == streamed.audio == both.audio


# --- text alone ---


def stage_steps(server: LiveServer) -> dict[str, float]:
    return server.metrics()["stage_step_time_s_count"]


async def test_text_alone_never_touches_the_speech_stages(server: LiveServer) -> None:
    await asyncio.sleep(HEARTBEAT_S * 1.2)
    before = stage_steps(server)
    request = {"model": "nano", "messages": body()["messages"], "max_tokens": 20}
    async with httpx.AsyncClient(base_url=server.url, timeout=LOAD_S) as client:
        for fields in ({}, {"modalities": ["text"]}, {"stream": True}):
            answer = await client.post("/v1/chat/completions", json=request | fields)
            assert answer.status_code == 200
    wait_until(lambda: stage_steps(server)["thinker"] >= before["thinker"] + 60, 2 * HEARTBEAT_S)
    after = stage_steps(server)
    assert (after["talker"], after["code2wav"]) == (before["talker"], before["code2wav"])


def test_a_text_only_server_has_no_speech_stage_and_says_so(nano: Path, tmp_path: Path) -> None:
    with LiveServer(nano, "--text-only", log=tmp_path / "log") as server:
        stages = [child for child in server.children() if "triptych.stages" in child.cmdline()]
        assert len(stages) == 1
        text = httpx.post(
            f"{server.url}/v1/chat/completions", json=body(modalities=["text"], audio=None), timeout=LOAD_S
        )
        assert text.status_code == 200 and text.json()["choices"][0]["message"]["content"]
        for modalities in (["audio"], ["text", "audio"]):
            for stream in (False, True):
                refused = httpx.post(
                    f"{server.url}/v1/chat/completions", json=body(modalities=modalities, stream=stream), timeout=5
                )
                assert refused.status_code == 400
                error = refused.json()["error"]
                assert error["param"] == "modalities" and "no speech stages" in error["message"]
        assert set(stage_steps(server)) == {"thinker"}


# --- what the operator sees ---


async def test_each_stage_counts_what_was_streamed(server: LiveServer, nano: Path) -> None:
    wait_until(lambda: not server.held(), 2 * HEARTBEAT_S, server.held)
    before = server.metrics()

    def since(name: str, label: str = "") -> float:
        return after[name][label] - before.get(name, {}).get(label, 0)

    def settled() -> bool:
        finished = server.metrics()["stage_requests_total"]["code2wav finished"]
        return not server.held() and finished == before["stage_requests_total"]["code2wav finished"] + 3

    async with httpx.AsyncClient(base_url=server.url, timeout=LOAD_S) as client:
        spoken = await asyncio.gather(*(ask(client, long_body(stream=True, seed=seed)) for seed in range(3)))
    wait_until(settled, 3 * HEARTBEAT_S, server.held)
    after = server.metrics()

    samples, frames = sum(len(answer.audio) // 2 for answer in spoken), since("audio_frames_total")
    assert samples == 1920 * frames - 3 * TAIL and frames == 3 * FRAMES
    assert since("audio_duration_s_sum") == pytest.approx(samples / 24000)
    assert since("stage_tokens_total", "talker") == since("stage_tokens_total", "code2wav") == frames
    assert since("stage_tokens_total", "thinker") == since("generation_tokens_total")
    for stage in ("thinker", "talker", "code2wav"):
        steps = since("stage_step_time_s_count", stage)
        assert steps > 0 and since("stage_step_time_s_sum", stage) > 0
        for name in ("stage_batch_size", "stage_step_tokens"):
            assert since(f"{name}_count", stage) == since(f"{name}_bucket", f"{stage} +Inf") == steps
            assert steps <= since(f"{name}_sum", stage)
        for name in ("request_queue_wait_s_count", "stage_gen_time_s_count"):
            assert since(name, stage) == 3
        assert since("stage_requests_total", f"{stage} finished") == 3
        assert (
            since("stage_requests_total", f"{stage} failed") == since("stage_requests_total", f"{stage} aborted") == 0
        )
    assert since("stage_step_tokens_sum", "code2wav") == frames
    talker = load_config(nano).talker
    assert talker is not None
    assert since("transfer_size_bytes_sum", "talker") == 4 * talker.num_code_groups * frames
    assert 0 < since("transfer_size_bytes_sum", "thinker") <= 4 * since("generation_tokens_total")
    for stage in ("thinker", "talker"):
        assert since("transfer_tx_s_count", stage) == since("transfer_size_bytes_count", stage) >= 3
        assert after["kv_cache_usage_perc"][stage] == 0 and after["kv_cache_blocks"][stage] > 0


# --- clients that leave ---


async def leave_early(client: httpx.AsyncClient, request: dict[str, Any], after_s: float) -> None:
    """Close the connection in the middle of an answer."""
    try:
        async with asyncio.timeout(after_s):
            await ask(client, request)
    except TimeoutError:
        return
    raise AssertionError("the answer was complete before its client could leave")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_freed_everywhere_within_a_second(server: LiveServer, stream: bool) -> None:
    endless = [{"ignore_eos": True, "max_tokens": 1500}, {"ignore_eos": True}]
    request = body(max_tokens=1500, stream=stream, sampling_params_list=endless)
    disconnected = server.metrics()["requests_total"]["disconnected"]
    async with httpx.AsyncClient(base_url=server.url, timeout=LOAD_S) as client:
        for after_s in (0.3, 0.6, 1.2):
            await leave_early(client, request | {"seed": 1}, after_s)
    left = time.monotonic()
    # The stages say at once when they have freed a request; what they hold is in their next heartbeat.
    wait_until(lambda: not {name for name in server.held() if name.startswith("num_")}, 1, server.held)
    wait_until(lambda: server.metrics()["num_requests_freeing"][""] == 0, 1)
    assert time.monotonic() - left < 1
    wait_until(lambda: not server.held(), 2 * HEARTBEAT_S, server.held)
    assert server.metrics()["requests_total"]["disconnected"] == disconnected + 3
