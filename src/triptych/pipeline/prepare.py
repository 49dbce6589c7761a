"""From chat messages and options to a GenerationRequest: the one place where defaults, overrides and seeds meet.

The HTTP server and the Python API both come through here, so a request means the same in either.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from triptych.config.sampling import SamplingParams, sampling_params
from triptych.config.schema import DeployConfig, StageKind
from triptych.errors import ConfigError, ContextLengthError, RequestError
from triptych.models.qwen3_omni.config import OmniConfig
from triptych.models.qwen3_omni.processor import Processor
from triptych.pipeline.request import GenerationRequest


def prepare(
    *,
    processor: Processor,
    config: OmniConfig,
    deploy: DeployConfig,
    messages: Sequence[Mapping[str, Any]],
    speak: bool,
    thinker: Mapping[str, Any],
    talker: Mapping[str, Any],
    voice: str | None,
    seed: int | None,
    request_id: str,
) -> GenerationRequest:
    """Tokenise and check a request, and fill every default.

    `thinker` and `talker` override the `default_sampling_params` of their own stage and of no other: greedy text never
    makes speech greedy. `seed` seeds both stages unless an override names another; without any, one fresh seed is
    drawn for both. Raises RequestError naming the field, ContextLengthError when the prompt, or the prompt and an
    answer length that was asked for, exceed the Thinker's context.
    """
    speaker = check_speech(config, deploy, voice) if speak else None
    chosen_seed = secrets.randbits(63) if seed is None else seed
    prompt = processor.encode(messages)
    params = _params("thinker", deploy, thinker, chosen_seed)
    _check_vocabulary(params, config.thinker.vocab_size)
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        thinker=_fit(params, len(prompt), context_length(config, deploy), asked="max_tokens" in thinker),
        talker=_params("talker", deploy, talker, chosen_seed) if speak else None,
        voice=speaker,
    )


def check_speech(config: OmniConfig, deploy: DeployConfig, voice: str | None) -> str | None:
    """The checkpoint's own spelling of `voice`, None for the default.

    Raises RequestError when the deployment has no speech stages, or the checkpoint no such voice.
    """
    if config.talker is None or deploy.stage("talker") is None or deploy.stage("code2wav") is None:
        raise RequestError("this server has no speech stages: ask for modalities ['text']", "modalities")
    if voice is None:
        return None
    names = {name.lower(): name for name in config.talker.speaker_id}
    if voice.lower() not in names:
        known = ", ".join(names) or "none"
        raise RequestError(f"voice {voice!r} is not one of this model's voices: {known}", "audio.voice")
    return names[voice.lower()]


def context_length(config: OmniConfig, deploy: DeployConfig) -> int:
    """How many text tokens, prompt and answer together, one request may have."""
    stage = deploy.stage("thinker")
    limit = config.thinker.max_position_embeddings
    return min(stage.max_model_len, limit) if stage and stage.max_model_len else limit


def _params(kind: StageKind, deploy: DeployConfig, overrides: Mapping[str, Any], seed: int) -> SamplingParams:
    stage = deploy.stage(kind)
    defaults = stage.default_sampling_params if stage else {}
    try:
        params = sampling_params({**defaults, **overrides}, kind)
    except ConfigError as error:
        raise RequestError(str(error), error.path) from error
    return params if params.seed is not None else msgspec.structs.replace(params, seed=seed)


def _check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    for field, ids in (("logit_bias", tuple(params.logit_bias)), ("stop_token_ids", params.stop_token_ids)):
        outside = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
        if outside is not None:
            raise RequestError(f"token id {outside} is not between 0 and {vocab_size - 1}", field)


def _fit(params: SamplingParams, num_prompt_tokens: int, limit: int, *, asked: bool) -> SamplingParams:
    room = limit - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens and the context {limit}, which leaves no room for an answer: "
            "shorten the messages"
        )
    if params.max_tokens is None or (params.max_tokens > room and not asked):
        return msgspec.structs.replace(params, max_tokens=room)
    if params.max_tokens > room:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens asks for {params.max_tokens} more, but the "
            f"context has {limit}: shorten the messages, or ask for at most {room} tokens"
        )
    return params
