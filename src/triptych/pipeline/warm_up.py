"""The request that a pipeline must serve before it counts as ready."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.config.sampling import SamplingParams
from triptych.config.schema import StageKind
from triptych.models.qwen3_omni.bridge import num_talker_rows, talker_prompt_token_ids
from triptych.models.qwen3_omni.config import OmniConfig
from triptych.pipeline.request import GenerationRequest

MAX_TOKENS = 4  # text tokens, and codec frames


def warm_up_request(request_id: str, config: OmniConfig, *, speak: bool) -> GenerationRequest:
    """A short turn in the shape of the chat template, from ids that every Qwen3-Omni vocabulary has."""
    filler = config.user_token_id  # stands for the line breaks and the words
    user = (config.im_start_token_id, config.user_token_id, filler, filler, config.im_end_token_id, filler)
    header = (config.im_start_token_id, config.assistant_token_id, filler)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, seed=0)
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=user + header, thinker=params, talker=params if speak else None
    )


def least_contexts(config: OmniConfig) -> Mapping[StageKind, int]:
    """The shortest context of each stage in which the warm-up fits: in tokens of text, rows of speech, codec frames."""
    prompt = warm_up_request("", config, speak=False).prompt_token_ids
    speech = num_talker_rows(talker_prompt_token_ids(prompt, config))
    return {"thinker": len(prompt) + MAX_TOKENS, "talker": speech + 1, "code2wav": 1}
