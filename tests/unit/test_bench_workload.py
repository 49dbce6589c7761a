"""What a benchmark asks: seeded, complete, and nothing given is ignored."""

from __future__ import annotations

import base64
import io
import json
import wave
from pathlib import Path
from typing import Any

import av
import pytest
from PIL import Image
from typer.testing import CliRunner

from triptych.bench.synthetic import video_url
from triptych.bench.workload import FileWorkload, Prompt, RandomWorkload, Reply
from triptych.cli import app
from triptych.errors import ConfigError
from triptych.server.protocol import parse_chat_request

ALL_MEDIA = RandomWorkload(
    input_len=5, images=2, audios=1, videos=1, image_size=(64, 48), audio_s=0.5, video_size=(64, 32), video_s=0.5
)


def bodies(workload: RandomWorkload | FileWorkload, count: int, seed: int, reply: Reply | None = None) -> list[bytes]:
    return [prompt.body("omni", reply or Reply()) for prompt in workload.prompts(count, seed)]


def content(url: str) -> bytes:
    return base64.b64decode(url.split(",", 1)[1])


def test_the_same_seed_gives_the_same_bytes() -> None:
    first = bodies(ALL_MEDIA, 3, seed=1)
    assert first == bodies(ALL_MEDIA, 3, seed=1) and first[:2] == bodies(ALL_MEDIA, 2, seed=1)
    assert not set(first) & set(bodies(ALL_MEDIA, 3, seed=2)) and len(set(first)) == 3


def test_a_video_is_the_same_bytes_each_time() -> None:
    """An encoder that starts from memory it has not set gives other bytes now and then."""
    assert len({video_url(64, 32, 0.5, 1) for _ in range(100)}) == 1


def test_no_two_requests_share_media() -> None:
    urls = [
        part[part["type"]]["url"]
        for prompt in ALL_MEDIA.prompts(3, seed=1)
        for part in prompt.messages[0]["content"]
        if part["type"] != "text"
    ]
    assert len(urls) == 12 == len(set(urls))


def test_a_prompt_has_the_words_and_the_media_that_were_asked_for() -> None:
    [prompt] = ALL_MEDIA.prompts(1, seed=0)
    first, second, audio, video, text = prompt.messages[0]["content"]
    assert len(text["text"].split()) == 5
    for part in (first, second):
        assert Image.open(io.BytesIO(content(part["image_url"]["url"]))).size == (64, 48)
    with wave.open(io.BytesIO(content(audio["audio_url"]["url"]))) as reader:
        assert reader.getnframes() / reader.getframerate() == 0.5
    with av.open(io.BytesIO(content(video["video_url"]["url"]))) as container:
        frames = list(container.decode(video=0))
    assert len(frames) == 5 and (frames[0].width, frames[0].height) == (64, 32)
    [plain] = RandomWorkload(input_len=7).prompts(1, seed=0)
    assert len(plain.messages[0]["content"].split()) == 7


@pytest.mark.parametrize(
    "reply",
    [
        Reply(),
        Reply(("text", "audio"), voice="chelsie", max_tokens=9, ignore_eos=True, temperature=0.5),
        Reply(("audio",), extra={"seed": 7, "sampling_params_list": [{}, {"max_tokens": 20}]}),
    ],
)
def test_every_body_is_a_request_that_our_server_takes(reply: Reply) -> None:
    for body in bodies(ALL_MEDIA, 1, 0, reply):
        request = parse_chat_request(body)
        assert request.stream and request.includes_usage and len(request.media()) == 4
        assert request.wants_audio is reply.speaks and request.max_tokens == reply.max_tokens
        assert request.speaker_name == reply.voice and bool(request.ignore_eos) is reply.ignore_eos
        assert request.audio_format == ("pcm16" if reply.speaks else "wav")


def test_extra_fields_win_and_null_takes_one_out() -> None:
    prompt = Prompt([{"role": "user", "content": "Hi"}], max_tokens=3)
    assert json.loads(prompt.body("m", Reply(max_tokens=5)))["max_tokens"] == 3
    body = json.loads(prompt.body("m", Reply(extra={"max_tokens": 8, "stream_options": None})))
    assert body["max_tokens"] == 8 and "stream_options" not in body


# --- files ---


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_a_file_holds_prompts_messages_and_media(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And this?"}]
    path = written(
        tmp_path,
        {"prompt": "Hello", "max_tokens": 5},
        "",
        {"messages": talk, "image": ["a.png", "https://example.com/b.jpg"], "audio": "data:audio/wav;base64,AA=="},
    )
    workload = FileWorkload.read(path)
    assert workload.usual_count == 2
    first, second, again = workload.prompts(3, seed=0)
    assert first == again, "from the top again"
    assert first.messages == [{"role": "user", "content": "Hello"}] and first.max_tokens == 5
    assert second.messages[0] == talk[0]
    parts = second.messages[1]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "audio_url", "text"]
    assert parts[0]["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(b"picture").decode()
    assert parts[3]["text"] == "And this?"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ({}, "either prompt or messages"),
        ({"prompt": "a", "messages": []}, "either prompt or messages"),
        ({"prompt": "a", "picture": "x.png"}, "picture"),
        ({"prompt": "a", "image": "missing.png"}, "'missing.png' cannot be read"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
        ({"messages": [{"role": "assistant", "content": "a"}], "image": "data:,"}, "not the user's"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: Any, said: str) -> None:
    with pytest.raises(ConfigError, match="line 2") as error:
        FileWorkload.read(written(tmp_path, {"prompt": "fine"}, line))
    assert said in str(error.value)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no prompts"):
        FileWorkload.read(written(tmp_path, "", " "))
    with pytest.raises(ConfigError, match="cannot be read"):
        FileWorkload.read(tmp_path / "nowhere.jsonl")


# --- the command line ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--voice", "x"], "--voice is for speech"),
        (["--modalities", "audio,text"], "must be text, or text,audio, or audio"),
        (["--dataset-path", "x"], "--dataset-path is for --dataset-name file"),
        (["--dataset-name", "file"], "needs --dataset-path"),
        (["--dataset-name", "file", "--random-input-len", "3"], "--random-input-len is for --dataset-name random"),
        (["--dataset-name", "file", "--random-image", "0"], "--random-image is for --dataset-name random"),
        (["--max-tokens", "3"], "--random-output-len"),
        (["--random-image-size", "64x64"], "--random-image-size needs --random-image"),
        (["--random-audio-seconds", "3"], "--random-audio-seconds needs --random-audio"),
        (["--random-video", "0", "--random-video-seconds", "3"], "needs --random-video"),
        (["--random-image", "1", "--random-image-size", "64"], "'64' is not WIDTHxHEIGHT"),
        (["--random-image", "1", "--random-image-size", "64xx64"], "is not WIDTHxHEIGHT"),
        (["--random-video", "1", "--random-video-size", "63x64"], "both even"),
        (["--request-rate", "0"], "--request-rate 0 is not more than 0"),
        (["--request-rate", "nan"], "--request-rate nan"),
        (["--goodput", "rtf:1"], "--modalities text,audio"),
        (["--save-detailed"], "--result-json"),
        (["--result-json", "nowhere/at/all.json"], "nowhere/at is not a folder"),
        (["--extra-body", "[]"], "not a JSON object"),
        (["--extra-body", '{"stream": false, "model": "x"}'], "sets model, stream"),
        (["--base-url", "localhost"], "does not start with http://"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_before_anything_is_sent(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert isinstance(result.exception, ConfigError), result.output
    assert said in str(result.exception)
