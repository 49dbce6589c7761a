"""What is asked. The same seed and options give the same requests, byte for byte."""

from __future__ import annotations

import base64
import mimetypes
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from triptych.errors import ConfigError

MODALITIES = (("text",), ("text", "audio"), ("audio",))
KINDS = ("image", "audio", "video")
OWN_FIELDS = ("model", "messages", "modalities", "stream")  # of a request; `--extra-body` may not set them
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
).split()


@dataclass(frozen=True, slots=True)
class Reply:
    """How every request wants its answer. `extra` is merged over the body last; a null takes a field out of it."""

    modalities: tuple[str, ...] = ("text",)
    voice: str | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    temperature: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def speaks(self) -> bool:
        return "audio" in self.modalities


@dataclass(frozen=True, slots=True)
class RandomWorkload:
    """Prompts of `input_len` words drawn at random, with media made up for each."""

    input_len: int = 128
    images: int = 0
    audios: int = 0
    videos: int = 0
    image_size: tuple[int, int] = (448, 448)  # width, height
    audio_s: float = 5.0
    video_size: tuple[int, int] = (320, 192)
    video_s: float = 4.0

    @property
    def usual_count(self) -> int:
        return 100

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        return [self._prompt(index, seed) for index in range(count)]

    def _prompt(self, index: int, seed: int) -> Prompt:
        from triptych.bench import synthetic

        draw = random.Random(f"prompt {seed} {index}")
        text = " ".join(draw.choices(WORDS, k=self.input_len))
        parts = [_part("image", synthetic.image_url(*self.image_size, _media_seed(draw))) for _ in range(self.images)]
        parts += [_part("audio", synthetic.audio_url(self.audio_s, _media_seed(draw))) for _ in range(self.audios)]
        parts += [
            _part("video", synthetic.video_url(*self.video_size, self.video_s, _media_seed(draw)))
            for _ in range(self.videos)
        ]
        return Prompt([{"role": "user", "content": _with_media(text, parts)}])


@dataclass(frozen=True, slots=True)
class FileWorkload:
    """The prompts of a file, from the top again when more are wanted than it has."""

    lines: tuple[Prompt, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of JSON lines and the media it names. Raises ConfigError, with the number of the line."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--dataset-path {path} cannot be read: {error}") from error
        urls: dict[Path, str] = {}
        prompts = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    prompts.append(msgspec.json.decode(line, type=_Line).prompt(path.parent, urls))
                except (msgspec.DecodeError, ConfigError) as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from error
        if not prompts:
            raise ConfigError(f"--dataset-path {path} has no prompts")
        return cls(tuple(prompts))

    @property
    def usual_count(self) -> int:
        return len(self.lines)

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        return [self.lines[index % len(self.lines)] for index in range(count)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The messages of one request; `max_tokens` wins over the reply's."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None

    def body(self, model: str, reply: Reply) -> bytes:
        """The request's body, as JSON."""
        fields: dict[str, Any] = {
            "model": model,
            "messages": self.messages,
            "modalities": list(reply.modalities),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.max_tokens if self.max_tokens is not None else reply.max_tokens,
            "temperature": reply.temperature,
            "ignore_eos": True if reply.ignore_eos else None,
            "audio": {"format": "pcm16"} | ({"voice": reply.voice} if reply.voice else {}) if reply.speaks else None,
        } | reply.extra
        return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """`image`, `audio` and `video` are paths (from the file's folder on), https: or data: URLs; one, or a list."""

    prompt_: str | None = msgspec.field(default=None, name="prompt")
    messages: list[dict[str, Any]] | None = None
    image: str | list[str] | None = None
    audio: str | list[str] | None = None
    video: str | list[str] | None = None
    max_tokens: int | None = None

    def prompt(self, folder: Path, urls: dict[Path, str]) -> Prompt:
        if (self.prompt_ is None) == (self.messages is None):
            raise ConfigError("give either prompt or messages")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}, not at least 1")
        messages = self.messages if self.messages is not None else [{"role": "user", "content": self.prompt_}]
        parts = []
        for kind in KINDS:
            given: str | list[str] | None = getattr(self, kind)
            for source in [given] if isinstance(given, str) else given or []:
                parts.append(_part(kind, _read(source, folder, urls)))
        if parts:
            if not messages or messages[-1].get("role") != "user":
                raise ConfigError("media goes with the last message, which is not the user's")
            last = messages[-1]
            messages = [*messages[:-1], last | {"content": _with_media(last.get("content") or "", parts)}]
        return Prompt(messages, self.max_tokens)


Workload = RandomWorkload | FileWorkload


def _media_seed(draw: random.Random) -> int:
    return draw.getrandbits(32)


def _part(kind: str, url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def _with_media(content: Any, parts: Sequence[dict[str, Any]]) -> Any:
    """Media before the text, as the field does it. Content without media stays as it is."""
    if not parts:
        return content
    text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    return [*parts, *text]


def _read(source: str, folder: Path, urls: dict[Path, str]) -> str:
    """The URL of a source; a file that was read before is not read again."""
    if source.startswith(("https:", "http:", "data:")):
        return source
    path = folder / source
    if path not in urls:
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        try:
            urls[path] = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
        except OSError as error:
            raise ConfigError(f"{source!r} cannot be read: {error.strerror or error}") from error
    return urls[path]
