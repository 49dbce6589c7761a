"""The HTTP application over a scripted pipeline and a scripted loader of media, in process."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import numpy as np
from fastapi import FastAPI

from triptych.config.schema import DeployConfig, MediaConfig, StageConfig
from triptych.connectors.wire import FeatureRef, StageStats
from triptych.errors import CapacityError
from triptych.media.contract import MediaFeatures, MediaOptions, MediaPart, MediaStats
from triptych.pipeline.health import PipelineHealth, ProcessHealth, ProcessState
from triptych.pipeline.request import AudioDelta, Done, Event, GenerationRequest, TextDelta
from triptych.telemetry.stage_counts import StageCounts

DECODER = {
    "vocab_size": 1500,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 8,
}
RAW: dict[str, Any] = {
    "model_type": "qwen3_omni_moe",
    "thinker_config": {
        "text_config": DECODER,
        "audio_config": {"num_mel_bins": 8},
        "vision_config": {"patch_size": 16},
    },
    "talker_config": {
        "text_config": DECODER,
        "code_predictor_config": DECODER,
        "speaker_id": {"Chelsie": 1, "Ethan": 2},
    },
    "code2wav_config": {},
}
DEPLOY = DeployConfig(
    stages=(
        StageConfig(stage_id=0, stage="thinker", process="text", default_sampling_params={"max_tokens": 64}),
        StageConfig(stage_id=1, stage="talker", process="speech", default_sampling_params={"temperature": 0.9}),
        StageConfig(stage_id=2, stage="code2wav", process="text"),
    ),
    heartbeat_timeout_s=30.0,
)
BASE: dict[str, Any] = {"model": "omni", "messages": [{"role": "user", "content": "Say hello."}]}
SPEECH = BASE | {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "pcm16"}}

Step = Event | Exception | asyncio.Event


def samples(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


TEXT_SCRIPT: list[Step] = [
    TextDelta(text="Hel", num_tokens=1),
    TextDelta(text="lo.", num_tokens=2, finish_reason="stop"),
    Done(finish_reason="stop", prompt_tokens=9, text_tokens=3, audio_frames=0),
]
SPEECH_SCRIPT: list[Step] = [
    TextDelta(text="Hel", num_tokens=1),
    AudioDelta(samples=samples(0.0, 0.5, -0.5), num_frames=1, final=False),
    TextDelta(text="lo.", num_tokens=2, finish_reason="stop"),
    AudioDelta(samples=samples(1.0, -1.0), num_frames=2, final=True),
    Done(finish_reason="stop", prompt_tokens=9, text_tokens=3, audio_frames=3),
]
SPEECH_PCM = np.array([0, 16384, -16384, 32767, -32767], "<i2").tobytes()


class FakeStream:
    """Plays a script: events are given, exceptions raised, asyncio events waited for."""

    def __init__(self, script: Sequence[Step]) -> None:
        self._script = list(script)
        self.ended = False
        self.aborted = asyncio.Event()

    async def __anext__(self) -> Event:
        step = self._script.pop(0) if self._script else StopAsyncIteration()
        while isinstance(step, asyncio.Event):
            await step.wait()
            step = self._script.pop(0)
        if isinstance(step, Exception):
            self.ended = True
            raise step
        self.ended = isinstance(step, Done)
        return step

    async def aclose(self) -> None:
        if not self.ended:
            self.ended = True
            self.aborted.set()


class FakeOrchestrator:
    def __init__(self) -> None:
        self.script: Sequence[Step] = TEXT_SCRIPT
        self.refusal: Exception | None = None
        self.full = False
        self.submitted: list[GenerationRequest] = []
        self.streams: list[FakeStream] = []
        self.heartbeat_age_s: float | None = 0.5
        self.state = ProcessState.READY

    def check_room(self, *, speak: bool) -> None:
        if self.full:
            raise CapacityError("full")

    def submit(self, request: GenerationRequest) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(request)
        self.streams.append(FakeStream(self.script))
        return self.streams[-1]

    def health(self) -> PipelineHealth:
        def process(name: str, *stages: Any) -> ProcessHealth:
            return ProcessHealth(
                name=name,
                stages={stage: stage for stage in stages},
                state=self.state,
                pid=1,
                heartbeat_age_s=self.heartbeat_age_s,
                restarts=2,
            )

        return PipelineHealth(
            ready=self.state is ProcessState.READY,
            processes={"text": process("text", "thinker", "code2wav"), "speech": process("speech", "talker")},
            stages={"thinker": StageStats(stage="thinker", running=3, counts=StageCounts(tokens=77))},
            running=3,
            queued=1,
            freeing=0,
        )


class FakeLease:
    def __init__(self, items: Sequence[MediaFeatures]) -> None:
        self.items = items
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@dataclass
class FakeLoader:
    """Every image has 4 rows, every clip 13, every video 8 (and 13 of sound where that is asked for)."""

    stats: MediaStats = field(default_factory=MediaStats)
    refusal: Exception | None = None
    gate: asyncio.Event | None = None  # waited for before anything is loaded
    loading: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[list[MediaPart], MediaOptions]] = field(default_factory=list)
    leases: list[FakeLease] = field(default_factory=list)

    async def load(
        self, parts: Sequence[MediaPart], options: MediaOptions, *, max_rows: int | None = None
    ) -> FakeLease:
        self.asked.append((list(parts), options))
        self.loading.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.refusal is not None:
            raise self.refusal
        self.stats.decoded += len(parts)
        self.leases.append(FakeLease([features(part, options) for part in parts]))
        return self.leases[-1]

    async def close(self) -> None: ...


def features(part: MediaPart, options: MediaOptions) -> MediaFeatures:
    digest = f"{part.url} {options}".encode()
    if part.kind == "audio":
        mel = FeatureRef(segment="s", dtype="float32", shape=(8, 100))
        return MediaFeatures(kind="audio", digest=digest, features=mel, num_mel_frames=100)
    frames = 2 if part.kind == "video" else 1
    sound = None
    if part.kind == "video" and options.use_audio_in_video:
        sound = features(MediaPart(kind="audio", param=part.param), options)
    return MediaFeatures(
        kind=part.kind,
        digest=digest,
        features=FeatureRef(segment="s", dtype="uint8", shape=(2 * frames, 64, 64, 3)),
        grid=(frames, 4, 4),
        second_per_grid=1.0 if part.kind == "video" else 0.0,
        sound=sound,
    )


def limited(**limits: Any) -> DeployConfig:
    """The deployment with other limits for media and bodies."""
    return msgspec.structs.replace(DEPLOY, media=MediaConfig(**limits))


def client_of(app: FastAPI, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", **options)


async def post(client: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
    return await client.post(path, json=body)


def events_of(response: httpx.Response) -> list[Any]:
    """The data of each server-sent event; "[DONE]" stays a string."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def deltas_of(events: Sequence[Any]) -> list[dict[str, Any]]:
    return [event["choices"][0]["delta"] for event in events if event != "[DONE]" and event["choices"]]


def audio_of(events: Sequence[Any]) -> list[bytes]:
    pieces = [delta.get("audio", {}).get("data") for delta in deltas_of(events)]
    return [base64.b64decode(piece) for piece in pieces if piece is not None]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


class Connection:
    """One HTTP request against the application, by hand: the test decides when the client reads and when it leaves."""

    def __init__(self, app: FastAPI, body: dict[str, Any]) -> None:
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=1)  # a slow reader holds the server back
        self.incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
        }
        self.task = asyncio.create_task(app(scope, self.incoming.get, self.outgoing.put))  # type: ignore[arg-type]

    def leave(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def read(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.outgoing.get(), 5)

    async def ended(self) -> None:
        await asyncio.wait_for(self.task, 5)
