"""The answers of `POST /v1/chat/completions`, as OpenAI shapes them: one choice, whole or as a stream of chunks."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Sequence
from typing import Any

from triptych import __version__
from triptych.connectors.wire import TokenLogprob
from triptych.models.qwen3_omni.processor import Processor
from triptych.pipeline.request import Done

FINGERPRINT = f"triptych-{__version__}"


class Completion:
    """The identity of one answer, and the objects that carry it."""

    def __init__(self, *, model: str, audio_lifetime_s: int) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(16)}"
        self.audio_id = f"audio_{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = model
        self._audio_lifetime_s = audio_lifetime_s

    @property
    def expires_at(self) -> int:
        """When the audio's id stops being valid, in Unix seconds."""
        return self.created + self._audio_lifetime_s

    def whole(self, message: dict[str, Any], done: Done, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The `chat.completion` object."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "refusal": None} | message,
            "logprobs": logprobs,
            "finish_reason": done.finish_reason,
        }
        return self._object("chat.completion") | {"choices": [choice], "usage": usage(done)}

    def chunk(
        self, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        """A `chat.completion.chunk` object with one choice."""
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._object("chat.completion.chunk") | {"choices": [choice]}

    def usage_chunk(self, done: Done) -> dict[str, Any]:
        """The chunk after the last choice, with `choices` empty."""
        return self._object("chat.completion.chunk") | {"choices": [], "usage": usage(done)}

    def _object(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


def usage(done: Done) -> dict[str, Any]:
    """Token counts. In the prompt each row of an image, a clip or a video is one token, and a video's own sound counts
    as audio. In the answer an audio token is one codec frame (80 ms); `completion_tokens` counts text and audio
    together."""
    completion_tokens = done.text_tokens + done.audio_frames
    media = done.media_tokens
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": done.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": done.cached_tokens,
            "text_tokens": done.prompt_tokens - media.audio - media.image - media.video,
            "audio_tokens": media.audio,
            "image_tokens": media.image,
            "video_tokens": media.video,
        },
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "text_tokens": done.text_tokens,
            "audio_tokens": done.audio_frames,
        },
    }


def logprobs_object(entries: Sequence[TokenLogprob], processor: Processor) -> dict[str, Any]:
    """OpenAI's `logprobs`: for each token its text, bytes, log probability and the alternatives asked for."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": processor.token_text(token_id),
            "bytes": list(processor.token_bytes(token_id)),
            "logprob": max(logprob, -9999.0),  # OpenAI's stand-in for "practically impossible"; JSON has no infinity
        }

    content = [
        one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*alternative) for alternative in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def base64_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
