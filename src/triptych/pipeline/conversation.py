"""A prompt of the Python API as messages for the chat template, and the media that they bring along.

Files are the caller's own, so they are read here, wherever they are; what may be fetched is for the loader to say.
"""

from __future__ import annotations

import io
import os
import re
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from triptych.config.units import format_bytes
from triptych.errors import RequestError
from triptych.media.contract import HIGHEST_RATE, MediaKind, MediaPart
from triptych.pipeline.media import DETAIL_PIXELS

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]  # a user's words, or a whole conversation
_KINDS: dict[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
}
_FETCHED = re.compile(r"(https?|data):", re.IGNORECASE)
_PCM, _FLOAT = 1, 3  # sample formats of a WAV file
_MOST_CHANNELS = 255


def read_prompt(prompt: Prompt, max_bytes: int) -> tuple[list[Message], list[MediaPart]]:
    """The messages, media as `{"type": "image"}` and the like, and all media in their order.

    A part of media is as in the chat API (`image_url`, `audio_url`, `video_url`, `input_audio`), or of type "image",
    "audio" or "video": `{"type": "image", "image": x}`, where x is a path, a URL, a file's bytes, an image of Pillow,
    or sound as `(array, rate)`: float in [-1, 1] or int16, of shape [samples] or [samples, channels].

    Blocks while files are read. Raises RequestError naming the message or the part.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}], []
    if not isinstance(prompt, list | tuple):
        raise RequestError(f"{type(prompt).__name__} is neither a string nor a list of messages", "messages")
    messages: list[Message] = []
    media: list[MediaPart] = []
    for index, message in enumerate(prompt):
        path = f"messages[{index}]"
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise RequestError(f"{message!r:.80} is not a message of a role and content", path)
        role, content = message["role"], message["content"]
        if isinstance(content, list | tuple):
            content = [_part(part, role, f"{path}.content[{number}]", max_bytes) for number, part in enumerate(content)]
            media += [part for part in content if isinstance(part, MediaPart)]
            content = [{"type": part.kind} if isinstance(part, MediaPart) else part for part in content]
        elif not isinstance(content, str):
            raise RequestError(f"{type(content).__name__} is neither text nor a list of parts", f"{path}.content")
        # "developer" is OpenAI's newer name for "system", here as in the chat API.
        messages.append({"role": "system" if role == "developer" else role, "content": content})
    return messages, media


def _part(part: Any, role: Any, path: str, max_bytes: int) -> MediaPart | Mapping[str, str]:
    if not isinstance(part, Mapping):
        raise RequestError(f"{type(part).__name__} is no part: write {{'type': 'text', 'text': ...}}", path)
    name = str(part.get("type"))
    if name == "text" and isinstance(part.get("text"), str) and len(part) == 2:
        return {"type": "text", "text": part["text"]}
    kind = _KINDS.get(name)
    if kind is None or set(part) != {"type", name}:
        raise RequestError(
            f"{part!r:.80} is no part: write {{'type': 'text', 'text': ...}}, or image, audio or video for text",
            path,
        )
    if role != "user":
        raise RequestError(f"{name} in a message of role {role!r:.80}; only those of the user bring media", path)
    value, max_pixels = part[name], None
    if name.endswith("_url") and isinstance(value, Mapping):
        value, max_pixels = _addressed(kind, value, path)
    elif name == "input_audio":
        value = _input_audio(value, path)
    try:
        return replace(_media(kind, value, path, max_bytes), max_pixels=max_pixels)
    except (OSError, ValueError, RuntimeError) as error:  # a path with NUL in it, one of an unknown ~user
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{value!s:.200} cannot be read: {reason}", path) from error


def _media(kind: MediaKind, value: Any, path: str, max_bytes: int) -> MediaPart:
    if isinstance(value, str) and _FETCHED.match(value):
        return MediaPart(kind=kind, param=path, url=value)
    if isinstance(value, bytes | bytearray | memoryview):
        return MediaPart(kind=kind, param=path, data=_some(bytes(value), path))
    if isinstance(value, str | os.PathLike):
        return MediaPart(kind=kind, param=path, data=_some(_read(value, path, max_bytes), path))
    if kind == "image" and callable(getattr(value, "save", None)):
        file = io.BytesIO()
        value.save(file, "PNG")
        return MediaPart(kind=kind, param=path, data=file.getvalue())
    if kind == "audio" and isinstance(value, tuple) and len(value) == 2:
        return MediaPart(kind=kind, param=path, data=_wav(*value, path))
    takes = {"image": ", or an image of Pillow", "audio": ", or (array, rate)"}.get(kind, "")
    raise RequestError(f"{type(value).__name__} is no {kind}: give a path, a URL or bytes{takes}", path)


def _some(data: bytes, path: str) -> bytes:
    if not data:
        raise RequestError("the file is empty", path)
    return data


def _read(value: str | os.PathLike[str], path: str, max_bytes: int) -> bytes:
    text = os.fspath(value)
    if isinstance(text, str) and text[:5].lower() == "file:":
        text = unquote(urlsplit(text).path)
    file = Path(os.fsdecode(text)).expanduser()
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise RequestError(f"{file} is not a file", path)
    if found.st_size > max_bytes:
        sizes = f"{format_bytes(found.st_size)}, which is more than {format_bytes(max_bytes)}"
        raise RequestError(f"{file} has {sizes} (media.max_bytes)", path)
    return file.read_bytes()


def _addressed(kind: MediaKind, value: Mapping[str, Any], path: str) -> tuple[Any, int | None]:
    """The URL of an object that holds one, and how many pixels the image may have by its `detail`."""
    names = {"url", "detail"} if kind == "image" else {"url"}
    detail = value.get("detail")
    if not {"url"} <= set(value) <= names or detail not in (None, *DETAIL_PIXELS):
        allowed = f", 'detail': {' or '.join(DETAIL_PIXELS)}" if kind == "image" else ""
        raise RequestError(f"{value!r:.80} is not {{'url': ...{allowed}}}", path)
    return value["url"], DETAIL_PIXELS[detail] if detail is not None else None


def _input_audio(value: Any, path: str) -> str:
    right = isinstance(value, Mapping) and {"data"} <= set(value) <= {"data", "format"}
    if not right or not isinstance(value["data"], str):
        raise RequestError(f"{value!r:.80} is not {{'data': base64, 'format': ...}}", path)
    return f"data:;base64,{value['data']}"


def _wav(samples: Any, rate: Any, path: str) -> bytes:
    """The samples as a WAV file, which holds them exactly: float32, or 16 bit where they are integers."""
    array = np.asarray(samples)
    if array.ndim not in (1, 2) or not (np.issubdtype(array.dtype, np.floating) or array.dtype == np.int16):
        raise RequestError(
            f"samples of type {array.dtype} and shape {array.shape}; give floats in [-1, 1] or int16, of shape "
            "[samples] or [samples, channels]",
            path,
        )
    count, channels = array.shape if array.ndim == 2 else (len(array), 1)
    if not 1 <= channels <= max(1, min(count, _MOST_CHANNELS)):
        raise RequestError(
            f"samples of shape {array.shape}, which is {count} of {channels} channels each; give the shape [samples, "
            f"channels] (as array.T), with 1 to {_MOST_CHANNELS} channels and no more than there are samples",
            path,
        )
    whole = hasattr(rate, "__index__") and not isinstance(rate, bool)
    if not whole or not 1 <= rate <= HIGHEST_RATE:
        message = f"{rate!r:.80} is not a sample rate in Hz: give a whole number from 1 to {HIGHEST_RATE}"
        raise RequestError(message, path)
    rate = int(rate)
    form, kind = (_PCM, np.dtype("<i2")) if array.dtype == np.int16 else (_FLOAT, np.dtype("<f4"))
    body = np.ascontiguousarray(array, kind).tobytes()
    frame = channels * kind.itemsize
    fields = (16, form, channels, rate, rate * frame, frame, 8 * kind.itemsize)
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(body), b"WAVE", b"fmt ", *fields, b"data", len(body))
    return head + body
