"""From chat messages and options to a GenerationRequest: the one place where defaults, overrides and seeds meet.

The HTTP server and the Python API both come through here, so a request means the same in either.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from triptych.config.sampling import SamplingParams, is_text, sampling_params
from triptych.config.schema import DeployConfig, StageKind
from triptych.connectors.wire import MediaItem
from triptych.errors import ConfigError, ContextLengthError, RequestError, UnknownNameError
from triptych.media.contract import MediaFeatures, MediaLease
from triptych.models.qwen3_omni.config import OmniConfig
from triptych.models.qwen3_omni.media_layout import KINDS, Span, expand, media_rows, part_rows
from triptych.models.qwen3_omni.processor import Processor
from triptych.pipeline.request import GenerationRequest, MediaTokens

ROLES = ("system", "user", "assistant")
SHORTEN_MEDIA = "send smaller pictures (max_pixels), fewer frames of a video (fps, num_frames) or shorter clips"


def prepare(
    *,
    processor: Processor,
    config: OmniConfig,
    deploy: DeployConfig,
    messages: Sequence[Mapping[str, Any]],
    speak: bool,
    request_id: str,
    thinker: Mapping[str, Any] | None = None,
    talker: Mapping[str, Any] | None = None,
    voice: str | None = None,
    seed: int | None = None,
    media: Sequence[MediaFeatures] = (),
    lease: MediaLease | None = None,
) -> GenerationRequest:
    """Tokenise and check a request, and fill every default.

    `thinker` and `talker` override the `default_sampling_params` of their own stage and of no other: greedy text never
    makes speech greedy. `seed` seeds both stages unless an override names another; without any, one fresh seed is
    drawn for both. `media` are the decoded media parts of the messages, in order, and `lease` is what holds them; it
    stays the caller's when this raises. Raises RequestError naming the field. Whether the request fits is for admission
    to say.
    """
    check_messages(messages, config)
    speaker, params, speech = _options(config, deploy, speak, thinker or {}, talker or {}, voice, seed)
    context = context_length(config, deploy)
    rows = sum(part_rows(part, config.media) for part in media)
    _check_length(processor.fewest_tokens(messages), rows, context)
    prompt, spans = expand(processor.encode(messages), media, config)
    if (thinker or {}).get("max_tokens") is None:
        params = _fit(params, context - len(prompt))
    items = media_items(media, spans)
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        thinker=params,
        talker=speech,
        voice=speaker,
        media=items,
        media_tokens=MediaTokens(**media_rows(items, config.media)),
        lease=lease,
    )


def check_request(
    *,
    processor: Processor,
    config: OmniConfig,
    deploy: DeployConfig,
    messages: Sequence[Mapping[str, Any]],
    speak: bool,
    thinker: Mapping[str, Any] | None = None,
    talker: Mapping[str, Any] | None = None,
    voice: str | None = None,
    seed: int | None = None,
) -> None:
    """Refuse what `prepare` would refuse whatever the media is like: before anything is fetched or decoded."""
    check_messages(messages, config)
    _options(config, deploy, speak, thinker or {}, talker or {}, voice, seed)
    _check_length(processor.fewest_tokens(messages), 0, context_length(config, deploy))


def media_items(media: Sequence[MediaFeatures], spans: Sequence[Span]) -> tuple[MediaItem, ...]:
    """The parts of a request at their places in its prompt."""
    items = []
    for span in spans:
        part = media[span.part]
        features = part.sound if span.in_video and part.sound is not None else part
        items.append(
            MediaItem(
                kind=features.kind,
                start=span.start,
                end=span.end,
                digest=features.digest,
                grid=features.grid,
                second_per_grid=features.second_per_grid,
                num_mel_frames=features.num_mel_frames,
                in_video=span.in_video,
                features=features.features,
            )
        )
    return tuple(items)


def _check_length(fewest: int, media_rows: int, context: int) -> None:
    """A prompt that is far too long is refused before the work of tokenising it."""
    if fewest + media_rows >= context:
        kinds, what = ("the messages have", "shorten the messages")
        if media_rows:
            kinds, what = f"the messages, {media_rows} rows of media among them, have", f"{what}, or {SHORTEN_MEDIA}"
        raise ContextLengthError(
            f"{kinds} {fewest + media_rows} tokens or more, and this model's context of {context} tokens must hold "
            f"them and at least 1 token of the answer; {what}"
        )


def check_messages(messages: Sequence[Mapping[str, Any]], config: OmniConfig) -> None:
    """Check that messages are text and media of kinds that the model takes, by a system, user or assistant.

    Media is a part of type "image", "audio" or "video", whatever else it holds. Raises RequestError with the dotted
    path of the first part that is neither.
    """
    if not messages:
        raise RequestError("there is no message; give at least one", "messages")
    for index, message in enumerate(messages):
        path = f"messages.{index}"
        if message.get("role") not in ROLES:
            raise RequestError(f"role {message.get('role')!r:.80} is not one of {', '.join(ROLES)}", f"{path}.role")
        content = message.get("content")
        if isinstance(content, list | tuple):
            for number, part in enumerate(content):
                _check_part(part, config, f"{path}.content.{number}")
        elif isinstance(content, str):
            _check_text(content, f"{path}.content")
        else:
            raise RequestError("content is neither a string nor a list of parts", f"{path}.content")


def _check_part(part: Any, config: OmniConfig, path: str) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind in KINDS:
        encoder = "audio" if kind == "audio" else "vision"
        if not (config.media.has_audio if kind == "audio" else config.media.has_vision):
            raise RequestError(
                f"this model takes no {kind} input: its checkpoint has no {encoder} encoder "
                f"({encoder}_config); leave the part out",
                path,
            )
    elif kind == "text" and isinstance(part.get("text"), str):
        _check_text(part["text"], path)
    else:
        raise RequestError(f"a part of type {kind!r:.80} is not one of text, {', '.join(KINDS)}", path)


def _check_text(text: str, path: str) -> None:
    if not is_text(text):
        raise RequestError("half a surrogate pair is no character; send text that UTF-8 can write", path)


def _options(
    config: OmniConfig,
    deploy: DeployConfig,
    speak: bool,
    thinker: Mapping[str, Any],
    talker: Mapping[str, Any],
    voice: str | None,
    seed: int | None,
) -> tuple[str | None, SamplingParams, SamplingParams | None]:
    """The voice, and how to sample text and speech. None for speech that is not asked for."""
    speaker = check_speech(config, deploy, voice) if speak else None
    fresh = secrets.randbits(63)
    params = _params("thinker", deploy, thinker, seed, fresh)
    _check_vocabulary(params, config.thinker.vocab_size)
    if not speak or config.talker is None:
        return speaker, params, None
    speech = _params("talker", deploy, talker, seed, fresh)
    _check_vocabulary(speech, config.talker.text.vocab_size, "talker.")
    return speaker, params, speech


def check_speech(config: OmniConfig, deploy: DeployConfig, voice: str | None) -> str | None:
    """The checkpoint's own spelling of `voice`, None for the default.

    Raises RequestError when the deployment has no speech stages, or the checkpoint no such voice.
    """
    if config.talker is None or not has_speech(config, deploy):
        raise RequestError("this server has no speech stages: ask for modalities ['text']", "modalities")
    if voice is None:
        return None
    names = {name.lower(): name for name in config.talker.speaker_id}
    if voice.lower() not in names:
        known = ", ".join(names) or "none"
        raise RequestError(f"voice {voice!r:.80} is not one of this model's voices: {known}", "audio.voice")
    return names[voice.lower()]


def has_speech(config: OmniConfig, deploy: DeployConfig) -> bool:
    """Whether both the checkpoint and the deployment have the stages that speak."""
    return config.talker is not None and None not in (deploy.stage("talker"), deploy.stage("code2wav"))


def context_length(config: OmniConfig, deploy: DeployConfig) -> int:
    """How many text tokens, prompt and answer together, one request may have."""
    stage = deploy.stage("thinker")
    limit = config.thinker.max_position_embeddings
    return min(stage.max_model_len, limit) if stage and stage.max_model_len else limit


def _params(
    kind: StageKind, deploy: DeployConfig, overrides: Mapping[str, Any], seed: int | None, fresh: int
) -> SamplingParams:
    """Lowest first: a fresh seed, the deploy file's defaults, the request's seed, the overrides of this stage."""
    stage = deploy.stage(kind)
    requested = {} if seed is None else {"seed": seed}
    values = {"seed": fresh, **(stage.default_sampling_params if stage else {}), **requested, **overrides}
    if values["seed"] is None:
        values["seed"] = fresh
    try:
        return sampling_params(values, kind, speech=kind == "talker")
    except ConfigError as error:
        raise wrong_parameter(error) from error


def wrong_parameter(error: ConfigError) -> RequestError:
    """A wrong sampling parameter as an error of the request that has it."""
    return RequestError(str(error), error.path, "unknown_parameter" if isinstance(error, UnknownNameError) else None)


def _check_vocabulary(params: SamplingParams, vocab_size: int, prefix: str = "") -> None:
    try:
        params.check_vocabulary(vocab_size, prefix)
    except ConfigError as error:
        raise RequestError(error.reason, error.path) from error


def _fit(params: SamplingParams, room: int) -> SamplingParams:
    """Shrink a default answer length to the room that the prompt leaves. One that was asked for is never shrunk: what
    does not fit is refused at admission."""
    if params.max_tokens is None or room < 1:
        return params
    return msgspec.structs.replace(params, max_tokens=min(params.max_tokens, room))
