"""Prompts of the Python API: every way to give media, and what is none."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from triptych.errors import RequestError
from triptych.media.contract import MediaOptions, MediaPart
from triptych.pipeline.conversation import read_prompt
from triptych.pipeline.media import media_options

MOST = 1000
FILE = b"a file"


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def one(part: Any) -> MediaPart:
    _, [found] = read_prompt(user(part), MOST)
    return found


def refused(prompt: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read_prompt(prompt, MOST)
    return caught.value


def test_words_are_a_message_of_the_user() -> None:
    assert read_prompt("Hello.", MOST) == ([{"role": "user", "content": "Hello."}], [])


def test_media_keeps_its_order_and_its_place() -> None:
    prompt = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "image", "image": FILE}, {"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "audio", "audio": FILE}, {"type": "video", "video": FILE}]},
    ]
    messages, media = read_prompt(prompt, MOST)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[1]["content"] == [{"type": "image"}, {"type": "text", "text": "a"}]
    assert messages[3]["content"] == [{"type": "audio"}, {"type": "video"}]
    assert [(part.kind, part.param) for part in media] == [
        ("image", "messages[1].content[0]"),
        ("audio", "messages[3].content[0]"),
        ("video", "messages[3].content[1]"),
    ]


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_a_file_is_given_in_many_ways(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "a file.bin"
    file.write_bytes(FILE)
    for value in (str(file), file, file.as_uri(), FILE, bytearray(FILE), memoryview(FILE)):
        part = one({"type": kind, kind: value})
        assert (part.kind, part.data, part.url) == (kind, FILE, "")
    for url in ("https://x/a", "HTTP://x/a", "data:,a"):
        parts = [{"type": kind, kind: url}, {"type": f"{kind}_url", f"{kind}_url": {"url": url}}]
        assert [one(part).url for part in [*parts, {"type": f"{kind}_url", f"{kind}_url": url}]] == [url] * 3


def test_low_detail_is_a_limit_of_pixels_of_that_image() -> None:
    pixels = [
        one({"type": "image_url", "image_url": {"url": "https://x", "detail": detail}}).max_pixels
        for detail in ("low", "high", "auto", None)
    ]
    assert pixels == [512 * 512, None, None, None]


def test_input_audio_is_that_of_the_chat_api() -> None:
    data = base64.b64encode(FILE).decode()
    for value in ({"data": data, "format": "wav"}, {"data": data}):
        assert one({"type": "input_audio", "input_audio": value}).url == f"data:;base64,{data}"


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "LA", "I;16"])
def test_an_image_of_pillow_keeps_its_pixels(mode: str) -> None:
    rng = np.random.default_rng(3)
    image = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)).convert("L" if mode == "I;16" else mode)
    image = image.convert(mode)
    again = Image.open(io.BytesIO(one({"type": "image", "image": image}).data))
    assert np.array_equal(np.asarray(again.convert("RGBA")), np.asarray(image.convert("RGBA")))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int16"])
@pytest.mark.parametrize("shape", [(50,), (50, 1), (50, 2)])
def test_samples_arrive_exactly(dtype: str, shape: tuple[int, ...]) -> None:
    samples = np.random.default_rng(4).uniform(-1, 1, shape)
    given = (samples * 32767).astype(dtype) if dtype == "int16" else samples.astype(dtype)
    part = one({"type": "audio", "audio": (given, 22_050)})
    with av.open(io.BytesIO(part.data)) as container:
        stream = container.streams.audio[0]
        assert stream.rate == 22_050
        decoded = np.concatenate([frame.to_ndarray() for frame in container.decode(stream)], axis=1)
    expected = given if dtype == "int16" else given.astype(np.float32)
    assert np.array_equal(decoded.reshape(-1), expected.reshape(-1))


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ("hello", "str is no part"),
        ({"type": "image"}, "is no part"),
        ({"type": "picture", "picture": FILE}, "is no part"),
        ({"type": ["image"], "image": FILE}, "is no part"),
        ({"type": "image", "image": FILE, "detail": "low"}, "is no part"),
        ({"type": "text", "text": 5}, "is no part"),
        ({"type": "image", "image": 5}, "int is no image: give a path, a URL or bytes, or an image of Pillow"),
        ({"type": "video", "video": Image.new("RGB", (4, 4))}, "Image is no video"),
        ({"type": "audio", "audio": np.zeros(5)}, "give a path, a URL or bytes, or \\(array, rate\\)"),
        ({"type": "audio", "audio": (np.zeros(5, np.int32), 16000)}, "samples of type int32"),
        ({"type": "audio", "audio": (np.zeros((2, 2, 2)), 16000)}, "shape \\(2, 2, 2\\)"),
        (
            {"type": "audio", "audio": (np.zeros((2, 9000)), 16000)},
            "2 of 9000 channels each; give the shape",
        ),
        ({"type": "audio", "audio": (np.zeros((2, 90000)), 16000)}, "shape \\(2, 90000\\)"),
        ({"type": "audio", "audio": (np.zeros((300, 256)), 16000)}, "1 to 255 channels"),
        ({"type": "audio", "audio": (np.zeros((9, 0)), 16000)}, "9 of 0 channels"),
        (
            {"type": "audio", "audio": (np.zeros(5), 0)},
            "0 is not a sample rate in Hz: give a whole number from 1",
        ),
        ({"type": "audio", "audio": (np.zeros(5), 2**31 - 1)}, "2147483647 is not a sample rate"),
        ({"type": "audio", "audio": (np.zeros(5), 16000.0)}, "16000.0 is not a sample rate"),
        ({"type": "image", "image": ""}, "is not a file"),
        ({"type": "image", "image": "/nowhere/at-all.png"}, "/nowhere/at-all.png cannot be read: No such file"),
        ({"type": "image", "image": "/"}, "/ is not a file"),
        ({"type": "image", "image": "a\0b"}, "cannot be read"),
        ({"type": "image", "image": b""}, "the file is empty"),
        ({"type": "image", "image": Image.new("CMYK", (4, 4))}, "cannot be read"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "is not {'data': base64"),
        ({"type": "image_url", "image_url": {"url": "https://x", "detail": "medium"}}, "low or high"),
        ({"type": "video_url", "video_url": {"url": "https://x", "detail": "low"}}, "is not {'url': ...}"),
        ({"type": "image_url", "image_url": {}}, "is not {'url'"),
        ({"type": "input_audio", "input_audio": "AAAA"}, "is not {'data': base64"),
    ],
)
def test_what_is_no_media_is_refused_with_what_to_give(part: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        read_prompt(user({"type": "text", "text": "a"}, part), MOST)
    assert caught.value.param == "messages[0].content[1]"


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(b"x" * (MOST + 1))
    error = refused(user({"type": "image", "image": large}))
    assert "media.max_bytes" in str(error) and error.param == "messages[0].content[0]"


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_only_the_user_brings_media(role: str) -> None:
    assert "only those of the user" in str(refused([{"role": role, "content": [{"type": "image", "image": FILE}]}]))


@pytest.mark.parametrize("prompt", [5, [5], [{"role": "user"}], [{"role": "user", "content": 5}]])
def test_what_is_no_conversation_is_refused(prompt: Any) -> None:
    assert refused(prompt).param in ("messages", "messages[0]", "messages[0].content")


def test_options_are_those_of_the_processor() -> None:
    values = {"use_audio_in_video": True, "fps": 2, "min_frames": 4, "max_frames": None, "max_pixels": 50176}
    assert media_options(values) == MediaOptions(use_audio_in_video=True, fps=2.0, min_frames=4, max_pixels=50176)
    assert media_options({}) == MediaOptions()


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"fps": 0}, "fps"),
        ({"fps": "2"}, "fps"),
        ({"fps": True}, "fps"),
        ({"fps": float("nan")}, "fps"),
        ({"fps": float("inf")}, "fps"),
        ({"fps": 10**400}, "fps"),
        ({"fps": 1001}, "fps': should be a number from 0.01 to 1000; got 1001"),
        ({"num_frames": 2.0}, "num_frames"),
        ({"max_frames": 0}, "max_frames"),
        ({"max_pixels": 10**40}, "max_pixels"),
        ({"use_audio_in_video": 1}, "use_audio_in_video"),
        ({"size": {"longest_edge": 5}}, "size"),
        ({5: 5}, "5"),
    ],
)
def test_an_option_that_is_none_is_named(values: dict[Any, Any], name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        media_options(values)
    assert caught.value.param == f"mm_processor_kwargs.{name.partition(chr(39))[0]}"
