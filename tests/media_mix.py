"""Random conversations of several turns that mix text, images, clips and videos. Seeded; few files, so some recur."""

from __future__ import annotations

import base64
import random
from typing import Any

from PIL import Image

from tests.media_files import audio_file, film, image_file, noise, tone, video_file

WORDS = "what do you see hear say tell me more about this one and that other thing please again".split()


def _url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _image(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    picture = Image.fromarray(noise(rng.randint(30, 150), rng.randint(30, 150), seed))
    return {"type": "image_url", "image_url": {"url": _url("image/png", image_file(picture))}}


def _clip(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    rate = rng.choice((8000, 16000, 24000, 44100))
    data = audio_file(tone(rng.uniform(0.1, 4.0), rate) * rng.uniform(0.1, 1), rate)
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def _video(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    seconds = rng.randint(1, 3)
    sound = tone(seconds, 48000) if rng.random() < 0.5 else None
    data = video_file(film(seconds * 5, 32 * rng.randint(1, 3), 32 * rng.randint(1, 3)), fps=5, sound=sound)
    return {"type": "video_url", "video_url": {"url": _url("video/mp4", data)}}


def mixed_requests(count: int, seed: int, files: int = 8) -> list[dict[str, Any]]:
    """Bodies of chat requests, less `model`. All have a seed; half of them speak, half draw their text greedily."""
    rng = random.Random(seed)
    shelf = {
        "image": [_image(seed + index) for index in range(files)],
        "clip": [_clip(seed + index) for index in range(files)],
        "video": [_video(seed + index) for index in range(files)],
    }
    return [_request(rng, shelf, index) for index in range(count)]


def _request(rng: random.Random, shelf: dict[str, list[dict[str, Any]]], index: int) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": "You are terse."})
    for turn in range(rng.choice((1, 1, 1, 2, 3))):
        if turn:
            messages.append({"role": "assistant", "content": " ".join(rng.choices(WORDS, k=3))})
        parts: list[dict[str, Any]] = [
            {"type": "text", "text": " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))}
            for _ in range(rng.choice((0, 1, 1, 2)))
        ]
        parts += [rng.choice(shelf[rng.choice(list(shelf))]) for _ in range(rng.choice((0, 1, 1, 2)))]
        rng.shuffle(parts)
        messages.append({"role": "user", "content": parts or "and now"})
    body: dict[str, Any] = {"messages": messages, "max_tokens": rng.randint(2, 10), "seed": index}
    if rng.random() < 0.5:
        body["temperature"] = 0.8
    if rng.random() < 0.5:
        body["use_audio_in_video"] = True
    if rng.random() < 0.5:
        body |= {"modalities": ["text", "audio"], "audio": {"voice": "chelsie", "format": "pcm16"}}
        body["sampling_params_list"] = [{}, {"max_tokens": rng.randint(4, 16)}]
    return body
