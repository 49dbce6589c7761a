"""How the media of a request is read, and by when: the same for the HTTP and the Python API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from triptych.config.json_value import shown
from triptych.errors import DeadlineError, RequestError
from triptych.media.contract import MediaLease, MediaLoader, MediaOptions, MediaPart
from triptych.models.qwen3_omni.media_options import MAX_FPS, MIN_FPS

PATH = "mm_processor_kwargs"
DETAIL_PIXELS = {"auto": None, "low": 512 * 512, "high": None}  # of an image, as in OpenAI's API; None: the options'
MOST = 2**31 - 1  # of frames and of pixels, whatever a checkpoint allows


def media_options(values: Mapping[str, Any]) -> MediaOptions:
    """`mm_processor_kwargs` out of plain values, null the same as absent.

    Raises RequestError naming the option when it is unknown or no such number. Whether they go with each other, with
    the checkpoint and with the media is for the loader to say.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if name not in MediaOptions.__struct_fields__:
            known, name = ", ".join(MediaOptions.__struct_fields__), f"{name!s:.80}"
            raise RequestError(f"unknown option '{PATH}.{name}'; known: {known}", f"{PATH}.{name}", "unknown_parameter")
        if problem := _problem(name, value):
            message = f"'{PATH}.{name}': {problem}; got {shown(value)}"
            raise RequestError(message, f"{PATH}.{name}", "invalid_value")
    return msgspec.convert(given, MediaOptions)


async def load_media(
    loader: MediaLoader,
    parts: Sequence[MediaPart],
    options: MediaOptions,
    *,
    max_rows: int,
    arrival: float,
    timeout_s: float,
) -> MediaLease:
    """Fetch and decode what a request brings along, within its deadline: `timeout_s` after `arrival`, in loop time.

    Raises DeadlineError, or what the loader raises.
    """
    try:
        async with asyncio.timeout_at(arrival + timeout_s) as deadline:
            return await loader.load(parts, options, max_rows=max_rows)
    except TimeoutError:
        if not deadline.expired():
            raise
        message = f"the request took longer than {timeout_s:g} s; its media was still being loaded"
        raise DeadlineError(message, "media") from None


def _problem(name: str, value: Any) -> str | None:
    if name == "use_audio_in_video":
        return None if type(value) is bool else "should be true or false"
    if name == "fps":
        right = type(value) in (int, float) and MIN_FPS <= value <= MAX_FPS
        return None if right else f"should be a number from {MIN_FPS:g} to {MAX_FPS:g}"
    return None if type(value) is int and 1 <= value <= MOST else f"should be a whole number from 1 to {MOST}"
