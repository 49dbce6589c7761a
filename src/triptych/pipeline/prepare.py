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
from triptych.errors import ConfigError, ContextLengthError, RequestError
from triptych.models.qwen3_omni.config import OmniConfig
from triptych.models.qwen3_omni.processor import Processor
from triptych.pipeline.request import GenerationRequest

ROLES = ("system", "user", "assistant")


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
) -> GenerationRequest:
    """Tokenise and check a request, and fill every default.

    `thinker` and `talker` override the `default_sampling_params` of their own stage and of no other: greedy text never
    makes speech greedy. `seed` seeds both stages unless an override names another; without any, one fresh seed is
    drawn for both. Raises RequestError naming the field. Whether the request fits is for admission to say.
    """
    check_messages(messages)
    speaker = check_speech(config, deploy, voice) if speak else None
    fresh = secrets.randbits(63)
    params = _params("thinker", deploy, thinker or {}, seed, fresh)
    _check_vocabulary(params, config.thinker.vocab_size)
    speech = None
    if speak and config.talker is not None:
        speech = _params("talker", deploy, talker or {}, seed, fresh)
        _check_vocabulary(speech, config.talker.text.vocab_size, "talker.")
    context = context_length(config, deploy)
    prompt = _encode(processor, messages, context)
    if (thinker or {}).get("max_tokens") is None:
        params = _fit(params, context - len(prompt))
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        thinker=params,
        talker=speech,
        voice=speaker,
    )


def _encode(processor: Processor, messages: Sequence[Mapping[str, Any]], context: int) -> tuple[int, ...]:
    """The prompt. One that is far too long is refused before the work of tokenising it."""
    fewest = processor.fewest_tokens(messages)
    if fewest >= context:
        raise ContextLengthError(
            f"the messages have {fewest} tokens or more, and this model's context of {context} tokens must hold them "
            "and at least 1 token of the answer; shorten the messages"
        )
    return processor.encode(messages)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError with the dotted path of the first part that is not text by a system, user or assistant."""
    if not messages:
        raise RequestError("there is no message; give at least one", "messages")
    for index, message in enumerate(messages):
        path = f"messages.{index}"
        if message.get("role") not in ROLES:
            raise RequestError(f"role {message.get('role')!r:.80} is not one of {', '.join(ROLES)}", f"{path}.role")
        content = message.get("content")
        _check_text(content, f"{path}.content")
        for number, part in enumerate(content if isinstance(content, list | tuple) else ()):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise RequestError(
                    f"a part of type {kind!r}: this model server takes text input only", f"{path}.content.{number}"
                )
            _check_text(part["text"], f"{path}.content.{number}")
        if not isinstance(content, str | list | tuple):
            raise RequestError("content is neither a string nor a list of parts", f"{path}.content")


def _check_text(content: Any, path: str) -> None:
    if isinstance(content, str) and not is_text(content):
        raise RequestError("half a surrogate pair is no character; send text that UTF-8 can write", path)


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
        raise RequestError(str(error), error.path) from error


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
