"""The request of `POST /v1/chat/completions`, in OpenAI's shape plus the few names that vLLM's users know.

Nothing is ignored in silence. A field is honoured, or refused by name (unknown or not supported), or on this list of
bookkeeping fields that are accepted and have no effect: `user`, `metadata`, `store: false`, `safety_identifier`,
`prompt_cache_key`, `prompt_cache_retention`; and, beside the `id` of an assistant's `audio`, what else came with it.
Null is the same as absent, and so is an empty array of what cannot be asked for here: `tools`, `functions`, and in a
message `tool_calls`, `annotations`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError, from_json

from triptych.config.json_value import shown
from triptych.config.sampling import (
    LARGEST_TOP_K,
    LONGEST_STOP_STRING,
    MOST_STOP_STRINGS,
    MOST_TOKENS,
    sampling_params,
)
from triptych.errors import ConfigError, RequestError
from triptych.media.contract import MediaOptions, MediaPart
from triptych.pipeline.media import media_options
from triptych.pipeline.prepare import wrong_parameter
from triptych.server.audio import AudioFormat
from triptych.server.errors import PayloadTooLargeError, invalid_request
from triptych.server.message import NO_TOOLS, Body, Messages, TextPart, check_messages, refuse

STAGES = ("thinker", "talker", "code2wav")
MOST_METADATA = 16  # pairs, as in OpenAI's API
_HALF_PAIR = ("unexpected end of hex escape", "lone leading surrogate in hex escape")
MOST_VALUES = 2 * 1024**2  # in the JSON of a body, which without media is no longer than twice that


def _only(allowed: bool | int) -> BeforeValidator:
    """For a field of one value. To pydantic's Literal, as to Python, 1, 1.0 and true are one and the same."""

    def check(value: Any) -> Any:
        if value is not None and (type(value) is not type(allowed) or value != allowed):
            raise PydanticCustomError("only", "should be {expected}", {"expected": shown(allowed)})
        return value

    return BeforeValidator(check)


def _text_alone(response_format: Any) -> Any:
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise PydanticCustomError(
            "unsupported", 'the format {kind}; only "text" works here', {"key": "type", "kind": shown(kind)}
        )
    return response_format


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _named_voice(voice: Any) -> Any:
    if isinstance(voice, dict):
        raise PydanticCustomError("unsupported", "custom voices; give the name of a voice (see /v1/audio/voices)")
    return voice


def _every_token(top_k: Any) -> Any:
    return 0 if type(top_k) is int and top_k == -1 else top_k  # vLLM's spelling of "keep every token"


def _biases(value: Any) -> Any:
    """`logit_bias` by token id: JSON's keys are strings. Ends at the first that is wrong, unlike pydantic."""
    if not isinstance(value, dict):
        return value
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise PydanticCustomError("token_id", "a key should be a token id", {"key": key})
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise PydanticCustomError("bias", "should be a number from -100 to 100", {"key": key})
        biases[int(key)] = float(bias)
    return biases


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MOST_METADATA:
        raise PydanticCustomError("pairs", "takes at most {most} pairs", {"most": MOST_METADATA})
    return value


class AudioOptions(Body):
    """`voice` None is the model's default. OpenAI requires both fields; here they have defaults."""

    voice: Annotated[str | None, BeforeValidator(_named_voice)] = None
    format: AudioFormat = "wav"


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Literal[False] | None, _only(False)] = None


class ResponseFormat(Body):
    type: Literal["text"]


class ChatCompletionRequest(Body):
    model: str
    messages: Messages

    modalities: Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=2)] | None = None
    audio: AudioOptions | None = None
    speaker: str | None = None  # vLLM-Omni's names for audio.voice
    voice: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Literal[1] | None, _only(1)] = None
    response_format: Annotated[ResponseFormat | None, BeforeValidator(_text_alone)] = None

    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP_STRING)]],
            Field(max_length=MOST_STOP_STRINGS, fail_fast=True),
            BeforeValidator(_listed),
        ]
        | None
    ) = None
    # Sampling beyond OpenAI's, under vLLM's names.
    top_k: Annotated[int, BeforeValidator(_every_token), Field(ge=0, le=LARGEST_TOP_K)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    sampling_params_list: Annotated[list[dict[str, Any]], Field(max_length=len(STAGES))] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    use_audio_in_video: bool | None = None

    # Bookkeeping: accepted, without effect.
    user: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_few)] | None = None
    store: Annotated[Literal[False] | None, _only(False)] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # Known, but not honoured here.
    tools: Annotated[None, refuse(NO_TOOLS, lists=True)] = None
    tool_choice: Annotated[None, refuse(NO_TOOLS)] = None
    parallel_tool_calls: Annotated[None, refuse(NO_TOOLS)] = None
    functions: Annotated[None, refuse(NO_TOOLS, lists=True)] = None
    function_call: Annotated[None, refuse(NO_TOOLS)] = None
    web_search_options: Annotated[None, refuse("this server does not search the web")] = None
    prediction: Annotated[None, refuse("this server takes no predicted output")] = None
    reasoning_effort: Annotated[None, refuse("this model has no such setting")] = None
    verbosity: Annotated[None, refuse("this model has no such setting")] = None
    service_tier: Annotated[None, refuse("this server has one tier")] = None
    moderation: Annotated[None, refuse("this server does not moderate")] = None

    @property
    def wants_text(self) -> bool:
        return self.modalities is None or "text" in self.modalities

    @property
    def wants_audio(self) -> bool:
        return self.modalities is not None and "audio" in self.modalities

    @property
    def audio_format(self) -> AudioFormat:
        return self.audio.format if self.audio else "wav"

    @property
    def voices(self) -> dict[str, str]:
        """The voice asked for, under each of its names that is given."""
        names = {"audio.voice": self.audio.voice if self.audio else None, "speaker": self.speaker, "voice": self.voice}
        return {field: name for field, name in names.items() if name is not None}

    @property
    def speaker_name(self) -> str | None:
        return next(iter(self.voices.values()), None)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def media(self) -> list[MediaPart]:
        """Everything that is to be seen or heard, in the order of the conversation."""
        return [
            part.media(f"messages.{index}.content.{number}")
            for index, message in enumerate(self.messages)
            if isinstance(message.content, list)
            for number, part in enumerate(message.content)
            if not isinstance(part, TextPart)
        ]

    def media_options(self) -> MediaOptions:
        """How the media is to be read. Raises RequestError naming the option that is wrong."""
        given = dict(self.mm_processor_kwargs or {})
        if self.use_audio_in_video is not None:
            given["use_audio_in_video"] = self.use_audio_in_video
        return media_options(given)

    def overrides(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sampling parameters for the Thinker and for the Talker. Top-level fields concern the Thinker alone; the
        Talker is reached through `sampling_params_list`. The entry of a stage that does not run has no effect."""
        own = {name: value for name in _THINKER_FIELDS if (value := getattr(self, name)) is not None}
        if self.max_completion_tokens is not None:
            own["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            own["logprobs"] = self.top_logprobs or 0
        return self.listed(0) | own, self.listed(1)

    def listed(self, stage: int) -> dict[str, Any]:
        """What `sampling_params_list` says for a stage. Null is the same as absent."""
        values = (self.sampling_params_list or [])[stage : stage + 1]
        return {name: value for name, value in values[0].items() if value is not None} if values else {}

    def written(self, param: str | None) -> str | None:
        """The field as this client wrote it, where the pipeline has a name of its own for it."""
        if param is None or param.startswith("talker."):
            return param and f"sampling_params_list.1.{param.removeprefix('talker.')}"
        name = param.removeprefix("thinker.")
        if name.split(".")[0] in self.listed(0):
            return f"sampling_params_list.0.{name}"
        if name == "max_tokens" and self.max_tokens is None:
            return "max_completion_tokens"
        return next(iter(self.voices), name) if name == "audio.voice" else name


_THINKER_FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)


def parse_chat_request(body: bytes) -> ChatCompletionRequest:
    """Read and check a request body. Raises RequestError with the dotted path of the first wrong field."""
    num_values = sum(map(body.count, (b",", b"[", b"{")))  # or more
    if num_values > MOST_VALUES:
        raise PayloadTooLargeError(
            f"the body has {num_values} commas and opening brackets; this server takes {MOST_VALUES} at the most"
        )
    try:
        value = from_json(body)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {_reworded(str(error))}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError("the body is not a JSON object", code="invalid_json")
    try:
        request = ChatCompletionRequest.model_validate(value)
    except ValidationError as error:
        raise invalid_request(error) from error
    check_messages(request.messages)
    for check in _CHECKS:
        check(request)
    return request


def _reworded(error: str) -> str:
    """What the parser says; of half a surrogate pair it says only that an escape is wrong."""
    what, at, place = error.rpartition(" at line ")
    if what not in _HALF_PAIR:
        return error
    return f"a string has half of a surrogate pair, as of an emoji cut in two,{at}{place}; send whole characters"


def _check_media_options(request: ChatCompletionRequest) -> None:
    top, nested = request.use_audio_in_video, (request.mm_processor_kwargs or {}).get("use_audio_in_video")
    if None not in (top, nested) and top != nested:
        raise RequestError(
            f"'use_audio_in_video' is {shown(top)}, but in 'mm_processor_kwargs' it is {shown(nested)}; give one "
            "of them",
            "mm_processor_kwargs.use_audio_in_video",
            "invalid_value",
        )
    request.media_options()


def _check_modalities(request: ChatCompletionRequest) -> None:
    if request.modalities and len(set(request.modalities)) < len(request.modalities):
        raise RequestError(f"'modalities' names one twice: {shown(request.modalities)}", "modalities", "invalid_value")
    for field in ("audio", "speaker", "voice"):
        if getattr(request, field) is not None and not request.wants_audio:
            raise RequestError(
                f"{field!r} is given, but 'modalities' does not ask for audio; add 'audio' to it",
                field,
                "invalid_value",
            )


def _check_voice(request: ChatCompletionRequest) -> None:
    voices = request.voices
    if len({name.lower() for name in voices.values()}) > 1:
        raise RequestError(f"different voices are asked for: {shown(voices)}", list(voices)[-1], "invalid_value")


def _check_lengths(request: ChatCompletionRequest) -> None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"'max_tokens' is {old} and 'max_completion_tokens' {new}; give one of them", "max_tokens", "invalid_value"
        )


def _check_stream_options(request: ChatCompletionRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("'stream_options' needs 'stream': true", "stream_options", "invalid_value")


def _check_logprobs(request: ChatCompletionRequest) -> None:
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true", "top_logprobs", "invalid_value")


def _check_stage_params(request: ChatCompletionRequest) -> None:
    """Each entry must be right by itself, and say nothing that a top-level field says otherwise."""
    for index in range(len(request.sampling_params_list or [])):
        path, values = f"sampling_params_list.{index}", request.listed(index)
        if STAGES[index] == "code2wav" and values:
            raise RequestError(f"{path!r}: code2wav draws no tokens; leave it out or empty", path, "invalid_value")
        try:
            sampling_params(values, path, speech=STAGES[index] == "talker")
        except ConfigError as error:
            raise wrong_parameter(error) from error
    own = request.overrides()[0] | ({} if request.seed is None else {"seed": request.seed})
    for name, value in request.listed(0).items():
        if own.get(name) != value:
            raise RequestError(
                f"'sampling_params_list.0.{name}' is {shown(value)}, but at the top level {name!r} is "
                f"{shown(own.get(name))}; give one of them",
                f"sampling_params_list.0.{name}",
                "invalid_value",
            )


_CHECKS: tuple[Callable[[ChatCompletionRequest], None], ...] = (
    _check_media_options,
    _check_modalities,
    _check_voice,
    _check_lengths,
    _check_stream_options,
    _check_logprobs,
    _check_stage_params,
)
