"""Whether a request fits, before any stage hears of it, and the messages that announce it to each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from triptych.config.schema import DeployConfig, StageKind
from triptych.connectors.wire import MediaItem, SubmitCodec, SubmitSpeech, SubmitText
from triptych.errors import ContextLengthError, RequestError
from triptych.models.qwen3_omni.bridge import num_talker_rows, talker_prompt_token_ids, talker_spans
from triptych.models.qwen3_omni.config import OmniConfig, TalkerConfig
from triptych.models.qwen3_omni.media_layout import media_rows
from triptych.pipeline.prepare import SHORTEN_MEDIA
from triptych.pipeline.request import GenerationRequest

AUDIO_CREDIT = 16  # audio chunks of one request that may wait for its client


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """One message for each stage that the request needs, in the order to send them: consumers first, so that no
    handoff meets a stage that does not expect it.

    `work` is the most that each stage has to do: tokens of prompt and answer for the Thinker, codec frames for Talker
    and Code2Wav.
    """

    messages: tuple[tuple[StageKind, SubmitText | SubmitSpeech | SubmitCodec], ...]
    work: Mapping[StageKind, int]

    @property
    def stages(self) -> tuple[StageKind, ...]:
        return tuple(kind for kind, _ in self.messages)


def admit(request: GenerationRequest, deploy: DeployConfig, config: OmniConfig) -> Admission:
    """Check a request against the vocabulary, the voices and the context of every stage that it needs.

    Raises ContextLengthError or RequestError, with the numbers or names that would be right.
    """
    text = _text(request, deploy, config)
    most_tokens = text.params.max_tokens or 0
    tokens = len(text.prompt_token_ids) + most_tokens
    if request.talker is None:
        return Admission(messages=(("thinker", text),), work={"thinker": tokens})
    speech = _speech(request, deploy, config)
    frames = _most_frames(speech, most_tokens, deploy)
    codec = SubmitCodec(request_id=request.request_id, credit=AUDIO_CREDIT)
    return Admission(
        messages=(("code2wav", codec), ("talker", speech), ("thinker", text)),
        work={"code2wav": frames, "talker": frames, "thinker": tokens},
    )


def _text(request: GenerationRequest, deploy: DeployConfig, config: OmniConfig) -> SubmitText:
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("the prompt is empty", param="messages")
    largest = max(prompt)
    if min(prompt) < 0 or largest >= config.thinker.vocab_size:
        raise RequestError(f"token id {largest} is not in [0, {config.thinker.vocab_size})", param="messages")
    context = _context(deploy, "thinker", config.thinker.max_position_embeddings)
    left = context - len(prompt)
    if left < 1:
        among, remedy = _media_share(request.media, config)
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens{among}, and this model's context of {context} tokens must hold it "
            f"and at least 1 token of the answer; shorten the messages{remedy}"
        )
    wanted = request.thinker.max_tokens
    if wanted is not None and wanted > left:
        among, remedy = _media_share(request.media, config)
        raise ContextLengthError(
            f"{len(prompt)} prompt tokens{among} and max_tokens {wanted} make {len(prompt) + wanted}, more than this "
            f"model's context of {context} tokens; shorten the messages{remedy}, or ask for at most {left} tokens",
            param="max_tokens",
        )
    params = msgspec.structs.replace(request.thinker, max_tokens=wanted or left)
    return SubmitText(
        request_id=request.request_id,
        prompt_token_ids=prompt,
        params=params,
        speak=request.speaks,
        media=request.media,
    )


def _speech(request: GenerationRequest, deploy: DeployConfig, config: OmniConfig) -> SubmitSpeech:
    talker = config.talker
    if talker is None or request.talker is None or deploy.stage("talker") is None or deploy.stage("code2wav") is None:
        raise RequestError("this server has no speech stages; ask for text only", param="modalities")
    speaker_id = _speaker_id(request.voice, talker, config)
    try:
        prompt = talker_prompt_token_ids(request.prompt_token_ids, config)
        media = _talker_media(request, config)
    except ValueError as error:
        raise RequestError(f"this prompt cannot be answered in speech: {error}", param="messages") from error
    context = _context(deploy, "talker", talker.text.max_position_embeddings)
    rows = num_talker_rows(prompt)
    left = context - rows
    if left < 1:
        among, remedy = _media_share(media, config)
        raise ContextLengthError(
            f"the user turns make {rows} positions{among} for the speech stage, whose context of {context} must hold "
            f"them and at least 1 frame of speech; shorten the user messages{remedy}, or ask for text only"
        )
    codec = config.code2wav.max_position_embeddings if config.code2wav is not None else left
    most = min(request.talker.max_tokens or left, left, _context(deploy, "code2wav", codec))
    params = msgspec.structs.replace(request.talker, max_tokens=most)
    return SubmitSpeech(
        request_id=request.request_id, prompt_token_ids=prompt, speaker_id=speaker_id, params=params, media=media
    )


def _most_frames(speech: SubmitSpeech, text_tokens: int, deploy: DeployConfig) -> int:
    """How long the speech can be: its own limit, or the Talker's watchdog over that many tokens of text."""
    most, talker = speech.params.max_tokens or 0, deploy.stage("talker")
    return min(most, talker.frames_per_text_token * text_tokens + talker.extra_frames) if talker else most


def _talker_media(request: GenerationRequest, config: OmniConfig) -> tuple[MediaItem, ...]:
    """The media of the user turns where the Talker's prompt has it. The Talker gets the rows from the Thinker."""
    spans = talker_spans(request.prompt_token_ids, request.media, config)
    return tuple(
        msgspec.structs.replace(request.media[span.part], start=span.start, end=span.end, features=None)
        for span in spans
    )


def _media_share(media: Sequence[MediaItem], config: OmniConfig) -> tuple[str, str]:
    """How much of a prompt is media, and what makes it less: two pieces of a message, empty without any."""
    if not media:
        return "", ""
    rows = media_rows(media, config.media)
    listed = " and ".join(f"{count} of {kind}" for kind, count in rows.items() if count)
    return f" ({listed})", f", {SHORTEN_MEDIA}"


def _speaker_id(voice: str | None, talker: TalkerConfig, config: OmniConfig) -> int:
    name = config.default_speaker if voice is None else voice.lower()
    if name is None or name not in talker.speaker_id:
        known = ", ".join(talker.speaker_id) or "none"
        raise RequestError(f"unknown voice {voice!r}; voices of this model: {known}", param="audio.voice")
    return talker.speaker_id[name]


def _context(deploy: DeployConfig, kind: StageKind, checkpoint: int) -> int:
    stage = deploy.stage(kind)
    return (stage.max_model_len if stage else 0) or checkpoint
