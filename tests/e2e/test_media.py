"""Images, sound and video through a real server, as the official client sends them."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tests.live_server import HEARTBEAT_S, LiveServer, wait_until
from triptych import Omni

TEXT = {"type": "text", "text": "What is this?"}


def png(width: int = 120, height: int = 90, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def wav(seconds: float = 1.0) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 16_000, 0, "NONE", ""))
        out.writeframes((9000 * np.sin(np.arange(int(16_000 * seconds)) / 9)).astype("<i2").tobytes())
    return file.getvalue()


def mp4(*, sound: bool, seconds: int = 2) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        picture = container.add_stream("mpeg4", rate=8)
        picture.width, picture.height = 96, 64
        speech = container.add_stream("aac", rate=16_000, layout="mono") if sound else None
        rng = np.random.default_rng(1)
        for _ in range(8 * seconds):
            frame = av.VideoFrame.from_ndarray(rng.integers(0, 256, (64, 96, 3), dtype=np.uint8), format="rgb24")
            container.mux(picture.encode(frame))
        container.mux(picture.encode(None))
        if speech is not None:
            samples = (9000 * np.sin(np.arange(16_000 * seconds) / 9)).astype("<i2").reshape(1, -1)
            clip = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            clip.sample_rate = 16_000
            container.mux(speech.encode(clip))
            container.mux(speech.encode(None))
    return file.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


IMAGE = {"type": "image_url", "image_url": {"url": url(png())}}
CLIP = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav()).decode(), "format": "wav"}}
SILENT = {"type": "video_url", "video_url": {"url": url(mp4(sound=False), "video/mp4")}}
VIDEO = {"type": "video_url", "video_url": {"url": url(mp4(sound=True), "video/mp4")}}


@pytest.fixture(scope="module")
def server(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "media").mkdir()
    with LiveServer(nano, "--allowed-local-media-path", str(folder / "media"), log=folder / "log") as server:
        yield server
        wait_until(lambda: not server.held(), 10 * HEARTBEAT_S, server.held)


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
        assert server.ready(), server.said()


def ask(client: openai.OpenAI, *parts: Any, **fields: Any) -> Any:
    options = {"model": "nano", "max_tokens": 8, "seed": 3} | fields
    messages: Any = options.pop("messages", [{"role": "user", "content": [*parts, TEXT]}])
    return client.chat.completions.create(messages=messages, **options)


def tokens(answer: Any) -> dict[str, int]:
    details = answer.usage.prompt_tokens_details.model_dump()
    counts = {kind: details[f"{kind}_tokens"] for kind in ("text", "image", "audio", "video")}
    assert sum(counts.values()) == answer.usage.prompt_tokens
    return {kind: count for kind, count in counts.items() if count and kind != "text"}


@pytest.mark.parametrize(
    ("parts", "options", "kinds"),
    [
        ([IMAGE], {}, {"image"}),
        ([CLIP], {}, {"audio"}),
        ([SILENT], {}, {"video"}),
        ([VIDEO], {}, {"video"}),
        ([VIDEO], {"use_audio_in_video": True}, {"video", "audio"}),
        ([SILENT], {"mm_processor_kwargs": {"use_audio_in_video": True}}, {"video"}),
        ([CLIP, IMAGE, VIDEO, IMAGE], {}, {"audio", "image", "video"}),
    ],
    ids=["image", "audio", "silent video", "video", "video with its sound", "silent video with sound", "a mix"],
)
def test_every_kind_is_answered_in_text_and_speech(
    client: openai.OpenAI, parts: list[Any], options: dict[str, Any], kinds: set[str]
) -> None:
    answer = ask(client, *parts, extra_body=options)
    assert set(tokens(answer)) == kinds
    spoken = ask(
        client, *parts, extra_body=options, modalities=["text", "audio"], audio={"voice": "chelsie", "format": "wav"}
    )
    assert spoken.choices[0].message.content == answer.choices[0].message.content
    assert tokens(spoken) == tokens(answer)
    stream = ask(client, *parts, extra_body=options, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        answer.choices[0].message.content
    )
    assert tokens(chunks[-1]) == tokens(answer)


def test_what_media_says_changes_what_the_model_reads(client: openai.OpenAI) -> None:
    """The same shapes and so the same token counts; other pixels."""
    answers = [
        ask(client, {"type": "image_url", "image_url": {"url": url(png(seed=seed))}}, logprobs=True, max_tokens=1)
        for seed in (0, 0, 1)
    ]
    assert tokens(answers[0]) == tokens(answers[2])
    first, again, other = (answer.choices[0].logprobs.content[0].logprob for answer in answers)
    assert first == again != other


def test_options_change_the_number_of_tokens(client: openai.OpenAI) -> None:
    large = {"type": "image_url", "image_url": {"url": url(png(1100, 800))}}
    low = {"type": "image_url", "image_url": large["image_url"] | {"detail": "low"}}  # type: ignore[operator]
    plain, limited = ask(client, large), ask(client, low)
    fewer = ask(client, large, extra_body={"mm_processor_kwargs": {"max_pixels": 65536}})
    assert tokens(plain)["image"] > tokens(limited)["image"] > tokens(fewer)["image"]
    two, four = (ask(client, VIDEO, extra_body={"mm_processor_kwargs": {"num_frames": number}}) for number in (4, 8))
    assert tokens(four)["video"] == 2 * tokens(two)["video"]


def test_a_conversation_goes_on_with_what_was_shown_and_said_before(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": [IMAGE, TEXT]}]
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": "chelsie", "format": "wav"}}
    first = ask(client, messages=messages, **spoken)
    said = first.choices[0].message.audio
    question: Any = {"role": "user", "content": [CLIP, {"type": "text", "text": "And this?"}]}
    by_id = ask(client, messages=[*messages, {"role": "assistant", "audio": {"id": said.id}}, question], **spoken)
    replayed = ask(client, messages=[*messages, first.choices[0].message, question], **spoken)
    written = ask(client, messages=[*messages, {"role": "assistant", "content": said.transcript}, question], **spoken)
    answers = {
        (one.choices[0].message.content, one.choices[0].message.audio.data) for one in (by_id, replayed, written)
    }
    assert len(answers) == 1
    assert tokens(by_id) == tokens(replayed) == tokens(written) and set(tokens(by_id)) == {"image", "audio"}


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ({"type": "image_url", "image_url": {"url": url(b"not an image")}}, "image"),
        ({"type": "audio_url", "audio_url": {"url": url(png())}}, "audio"),
        ({"type": "video_url", "video_url": {"url": url(wav())}}, "video"),
        ({"type": "input_audio", "input_audio": {"data": "#", "format": "wav"}}, "base64"),
        ({"type": "image_url", "image_url": {"url": "https://127.0.0.1/a.png"}}, "127.0.0.1"),
        ({"type": "image_url", "image_url": {"url": "https://localhost/a.png"}}, "localhost"),
        ({"type": "image_url", "image_url": {"url": "ftp://example.com/a.png"}}, "ftp"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "path"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "local_path"),
        ({"type": "image_url", "image_url": {"url": url(png()), "detail": "medium"}}, "detail"),
        ({"type": "file", "file": {"file_id": "x"}}, "file"),
    ],
)
def test_a_part_that_cannot_be_taken_is_named(client: openai.OpenAI, part: Any, complaint: str) -> None:
    with pytest.raises(openai.BadRequestError, match=complaint) as caught:
        ask(client, TEXT, part)
    assert caught.value.param is not None and caught.value.param.startswith("messages.0.content.1")


def test_an_option_that_cannot_be_is_named(client: openai.OpenAI) -> None:
    for options, param in (({"fps": 2, "num_frames": 4}, "num_frames"), ({"max_pixels": 10**9}, "max_pixels")):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, VIDEO, extra_body={"mm_processor_kwargs": options})
        assert caught.value.param == f"mm_processor_kwargs.{param}"


def test_media_that_no_context_holds_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    file = io.BytesIO()
    Image.new("RGB", (1600, 1500), "red").save(file, "PNG")
    with pytest.raises(openai.BadRequestError, match=r"context of \d+") as caught:
        ask(client, *[{"type": "image_url", "image_url": {"url": url(file.getvalue())}}] * 20)
    assert caught.value.code == "context_length_exceeded"


def test_a_local_file_is_read_below_its_folder_alone(client: openai.OpenAI, server: LiveServer) -> None:
    folder = server.log.parent / "media"
    (folder / "a.png").write_bytes(png())
    (folder.parent / "secret.png").write_bytes(png())
    inside = ask(client, {"type": "image_url", "image_url": {"url": f"file://{folder}/a.png"}})
    assert tokens(inside) == tokens(ask(client, IMAGE))
    with pytest.raises(openai.BadRequestError, match="local_path"):
        ask(client, {"type": "image_url", "image_url": {"url": f"file://{folder.parent}/secret.png"}})


def test_a_client_that_leaves_while_a_video_is_decoded_holds_nobody_up(
    client: openai.OpenAI, server: LiveServer
) -> None:
    long = {"type": "video_url", "video_url": {"url": url(mp4(sound=True, seconds=60), "video/mp4")}}
    before = server.metrics()["requests_total"]["disconnected"]
    impatient = client.with_options(timeout=httpx.Timeout(30, read=0.05))
    for _ in range(3):
        with pytest.raises(openai.APITimeoutError):
            ask(impatient, long, extra_body={"mm_processor_kwargs": {"fps": 0.5}, "use_audio_in_video": True})
    wait_until(lambda: server.metrics()["requests_total"]["disconnected"] == before + 3, 10)
    assert tokens(ask(client, CLIP))


def test_the_metrics_tell_what_was_loaded(client: openai.OpenAI, server: LiveServer) -> None:
    fresh = {"type": "image_url", "image_url": {"url": url(png(seed=77))}}
    before = server.metrics()
    for _ in range(2):
        ask(client, fresh)
    with pytest.raises(openai.BadRequestError):
        ask(client, {"type": "image_url", "image_url": {"url": url(b"no")}})
    after = server.metrics()
    changes = {
        name: after[f"media_{name}_total"][""] - before[f"media_{name}_total"][""]
        for name in ("decoded", "cache_hits", "refused")
    }
    assert changes == {"decoded": 1, "cache_hits": 1, "refused": 1}
    assert after["media_decode_seconds_total"][""] > before["media_decode_seconds_total"][""]


def test_the_python_api_reads_what_the_server_reads(client: openai.OpenAI, nano: Path, tmp_path: Path) -> None:
    """As files, bytes, arrays or images: the same answers and counts as over HTTP."""
    files = {"image": png(), "audio": wav(), "video": mp4(sound=True)}
    for kind, data in files.items():
        (tmp_path / kind).write_bytes(data)
    samples = np.frombuffer(wav()[44:], "<i2")
    conversations = [
        [{"type": "image", "image": tmp_path / "image"}],
        [{"type": "image", "image": Image.open(tmp_path / "image")}],
        [{"type": "audio", "audio": str(tmp_path / "audio")}],
        [{"type": "audio", "audio": (samples, 16_000)}],
        [{"type": "video", "video": (tmp_path / "video").read_bytes()}],
    ]
    prompts = [[{"role": "user", "content": [*parts, TEXT]}] for parts in conversations]
    with Omni(str(nano), deploy_config="tiny_cpu", platform="cpu", text_only=True) as omni:
        missing = [{"role": "user", "content": [{"type": "image", "image": tmp_path / "nothing"}]}]
        *outputs, bad = omni.generate(
            [*prompts, missing], thinker={"max_tokens": 8}, mm_processor_kwargs={"use_audio_in_video": True}
        )
    answers = [ask(client, part, extra_body={"use_audio_in_video": True}) for part in (IMAGE, IMAGE, CLIP, CLIP, VIDEO)]
    for output, answer in zip(outputs, answers, strict=True):
        assert output.error is None
        assert output.text == answer.choices[0].message.content
        counts = {kind: getattr(output.media_tokens, kind) for kind in ("image", "audio", "video")}
        assert {kind: count for kind, count in counts.items() if count} == tokens(answer)
        assert output.prompt_tokens == answer.usage.prompt_tokens
    assert bad.error is not None and "nothing" in str(bad.error)
