"""The messages of a chat request: who says what, in words, images, audio and video."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from triptych.config.json_value import shown
from triptych.errors import RequestError
from triptych.media.contract import MediaKind, MediaPart
from triptych.pipeline.media import DETAIL_PIXELS

NO_TOOLS = "this server does not call tools"
MOST_MESSAGES = 16384  # as many as the longest context holds; and as many parts in one


class Body(BaseModel):
    """Validation ends soon after the first error (here, and `fail_fast` in lists): a body may be full of them."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise PydanticCustomError("object", "should be an object")
        for name in value:
            if name not in cls.model_fields:
                raise PydanticCustomError("unknown", "unknown field", {"key": name})
        return value


def refuse(reason: str, *, lists: bool = False) -> BeforeValidator:
    """A field that is known but not honoured: an error that says why. Null passes, and so does an empty array where the
    field `lists` what is asked for: that is nothing. An empty object may stand for all defaults, and does not."""

    def check(value: Any) -> None:
        if value is not None and not (lists and value == []):
            raise PydanticCustomError("unsupported", "{reason}", {"reason": reason})

    return BeforeValidator(check)


def _addressed(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value  # vLLM's users may leave the object out


def _no_url(data: str) -> str:
    if ":" in data[:16]:
        raise PydanticCustomError("base64", "should be base64; send a URL in a part of type 'audio_url'")
    return data


class TextPart(Body):
    type: Literal["text"]
    text: str


class MediaURL(Body):
    """Where a file is: an `https:` or `data:` URL; `http:` and `file:` where the deployment allows them."""

    url: Annotated[str, Field(min_length=1)]


class ImageURL(MediaURL):
    """With `detail` "low" the image is read at no more pixels than 512 x 512 has; else the request's options hold."""

    detail: Literal["auto", "low", "high"] | None = None


class InputAudio(Body):
    """A file in base64. `format` is what the client takes it for; what it holds decides."""

    data: Annotated[str, Field(min_length=1), AfterValidator(_no_url)]
    format: str | None = None


class ImagePart(Body):
    kind: ClassVar[MediaKind] = "image"
    type: Literal["image_url"]
    image_url: Annotated[ImageURL, BeforeValidator(_addressed)]

    def media(self, param: str) -> MediaPart:
        most = DETAIL_PIXELS[self.image_url.detail or "auto"]
        return MediaPart(kind=self.kind, param=param, url=self.image_url.url, max_pixels=most)


class AudioPart(Body):
    kind: ClassVar[MediaKind] = "audio"
    type: Literal["audio_url"]
    audio_url: Annotated[MediaURL, BeforeValidator(_addressed)]

    def media(self, param: str) -> MediaPart:
        return MediaPart(kind=self.kind, param=param, url=self.audio_url.url)


class VideoPart(Body):
    kind: ClassVar[MediaKind] = "video"
    type: Literal["video_url"]
    video_url: Annotated[MediaURL, BeforeValidator(_addressed)]

    def media(self, param: str) -> MediaPart:
        return MediaPart(kind=self.kind, param=param, url=self.video_url.url)


class InputAudioPart(Body):
    kind: ClassVar[MediaKind] = "audio"
    type: Literal["input_audio"]
    input_audio: InputAudio

    def media(self, param: str) -> MediaPart:
        return MediaPart(kind=self.kind, param=param, url=f"data:;base64,{self.input_audio.data}")


PARTS = ("text", "image_url", "audio_url", "video_url", "input_audio")


def _known_part(part: Any) -> Any:
    kind = part.get("type", PARTS[0]) if isinstance(part, dict) else PARTS[0]
    known = ", ".join(PARTS)
    if not isinstance(kind, str):
        raise PydanticCustomError("part_type", "should be one of {known}", {"key": "type", "known": known})
    if kind not in PARTS:
        raise PydanticCustomError(
            "unsupported", "a part of type {kind}; this model takes {known}", {"kind": shown(kind), "known": known}
        )
    return part


def _part_kind(part: Any) -> str:
    """The tag of the model that checks a part. Without a type that is text's, which says what is missing."""
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return f"({kind})" if isinstance(kind, str) else "(text)"


def _content_kind(content: Any) -> str | None:
    return "(text)" if isinstance(content, str) else "(parts)" if isinstance(content, list) else None


Part = Annotated[
    Annotated[TextPart, Tag("(text)")]
    | Annotated[ImagePart, Tag("(image_url)")]
    | Annotated[AudioPart, Tag("(audio_url)")]
    | Annotated[VideoPart, Tag("(video_url)")]
    | Annotated[InputAudioPart, Tag("(input_audio)")],
    Discriminator(_part_kind),
]
Content = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[
        list[Annotated[Part, BeforeValidator(_known_part)]],
        Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
        Tag("(parts)"),
    ],
    Discriminator(
        _content_kind,
        custom_error_type="content",
        custom_error_message="should be a string or an array of parts",
    ),
]


class AudioReference(Body):
    """An earlier spoken answer, as the API gave it. Only the `id` counts."""

    id: Annotated[str, Field(min_length=1)]
    data: str | None = None
    expires_at: int | None = None
    transcript: str | None = None


Role = Literal["system", "developer", "user", "assistant"]


class Message(Body):
    """`content` may be null where an assistant's message refers to what it said by `audio.id`."""

    role: Role
    name: Annotated[None, refuse("the model does not see participants' names")] = None
    audio: AudioReference | None = None
    tool_calls: Annotated[None, refuse(NO_TOOLS, lists=True)] = None
    function_call: Annotated[None, refuse(NO_TOOLS)] = None
    refusal: Annotated[None, refuse("send the text of the refusal as content")] = None
    annotations: Annotated[None, refuse("this server makes no annotations", lists=True)] = None
    content: Content | None = None

    @property
    def spoken_id(self) -> str | None:
        """The id of the speech that this message stands for; None where it has words of its own."""
        return self.audio.id if self.content is None and self.audio is not None else None

    def for_template(self, spoken: str | None = None) -> dict[str, Any]:
        """The message as the chat template takes it, media as `{"type": "image"}` and the like.

        `spoken` is the text of what `spoken_id` names. "developer" is OpenAI's newer name for "system".
        """
        content: Any = spoken if self.content is None else self.content
        if isinstance(content, list):
            content = [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": part.kind}
                for part in content
            ]
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


def _known_role(message: Any) -> Any:
    """The role comes first: one that is not known may bring fields of its own."""
    role = message.get("role") if isinstance(message, dict) else None
    if isinstance(role, str) and role not in get_args(Role):
        raise PydanticCustomError(
            "unsupported",
            "the role {role}; this server takes {known}",
            {"key": "role", "role": shown(role), "known": ", ".join(get_args(Role))},
        )
    return message


Messages = Annotated[
    list[Annotated[Message, BeforeValidator(_known_role)]],
    Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
]


def check_messages(messages: Sequence[Message]) -> None:
    """Raise RequestError for a message without content, and for what its role may not bring along."""
    for index, message in enumerate(messages):
        path = f"messages.{index}"
        if message.audio is not None and message.role != "assistant":
            raise RequestError(
                f"'{path}.audio' is for messages of the assistant; send audio as a part of type 'input_audio'",
                f"{path}.audio",
                "invalid_value",
            )
        if message.content is None and message.audio is None:
            raise RequestError(f"field '{path}.content' is required", f"{path}.content", "missing_required_parameter")
        if message.role == "user" or not isinstance(message.content, list):
            continue
        for number, part in enumerate(message.content):
            if not isinstance(part, TextPart):
                raise RequestError(
                    f"'{path}.content.{number}' is not supported: a part of type {part.type!r} in a message of role "
                    f"{message.role!r}; the model sees and hears in user messages only",
                    f"{path}.content.{number}",
                    "unsupported_parameter",
                )
