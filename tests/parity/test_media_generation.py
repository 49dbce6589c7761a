"""Prompts with images, clips and videos against Transformers, on tiny weights in float32: logits, tokens, codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.bench_media import MediaPrompt, clip, hf_inputs, picture, video
from tests.stage_bench import Bench
from triptych.config.sampling import SamplingParams
from triptych.models.qwen3_omni.preprocessor_config import load_preprocessor

TOKENS, FRAMES = 12, 16


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "compiled"])
def bench(nano: Path, request: pytest.FixtureRequest) -> Bench:
    return Bench(nano, enforce_eager=request.param)


@pytest.fixture
def hf(hf_nano: Any) -> Iterator[Any]:
    """Transformers. Its Talker's config lacks the `audio_config` that its code reads for pictures beside sound."""
    hf_nano.talker.config.audio_config = hf_nano.thinker.config.audio_config
    yield hf_nano
    del hf_nano.talker.config.audio_config


def mixed(bench: Bench) -> MediaPrompt:
    """No clip is shorter than one chunk of convolution: Transformers pads such to the longest clip beside it."""
    config = bench.config
    return bench.media_chat(
        (config.system_token_id, [50, 51]),
        (config.user_token_id, [40, picture(1), 41, clip(2, 230), 42, video(3, frames=7), 43]),
        (config.assistant_token_id, [60, 61]),
        (config.user_token_id, [clip(4, 177), *range(44, 60), picture(5, 32, 32), 45]),
    )


def with_system_media(bench: Bench) -> MediaPrompt:
    """Transformers lays its Talker's prompt out with the grids of the wrong pictures, so only its Thinker compares."""
    config = bench.config
    return bench.media_chat(
        (config.system_token_id, [50, picture(7, 32, 64), clip(8, 120), 51]),
        (config.user_token_id, [40, clip(2, 230), 41, picture(1), 42]),
    )


PROMPTS: dict[str, Callable[[Bench], MediaPrompt]] = {
    "image": lambda bench: bench.media_prompt(40, 41, picture(1), 42),
    "audio": lambda bench: bench.media_prompt(clip(2, 930), 40),
    "video": lambda bench: bench.media_prompt(video(3, frames=13, height=96), *range(40, 60)),
    "video-with-sound": lambda bench: bench.media_prompt(40, video(3, sound=clip(4, 250)), 41),
    "two-videos-with-sound": lambda bench: bench.media_prompt(
        40, video(3, sound=clip(4, 250)), 41, video(5, 6, 32, 96, sound=clip(6, 410)), 42, picture(8), 43
    ),
    "mixed": mixed,
}


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_answer_equals_hf(bench: Bench, hf: Any, nano: Path, name: str) -> None:
    prompt = PROMPTS[name](bench)
    inputs = hf_inputs(prompt, load_preprocessor(nano))
    speaker = next(iter(bench.config.talker.speaker_id)) if bench.config.talker else ""
    sequences, wave = hf.generate(
        **inputs,
        speaker=speaker,
        thinker_max_new_tokens=TOKENS + 1,
        thinker_do_sample=False,
        thinker_eos_token_id=None,
        talker_do_sample=False,
        talker_temperature=1.0,
        talker_max_new_tokens=FRAMES + 1,
    )
    seen: list[int] = []
    take = bench.thinker._take
    bench.thinker._take = lambda request, token, logprob: (seen.append(token), take(request, token, logprob))[1]  # type: ignore
    bench.submit(
        name,
        prompt.token_ids,
        media=prompt.items,
        thinker=SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, seed=0),
        talker=SamplingParams(temperature=0.0, max_tokens=FRAMES, repetition_penalty=1.05, seed=0),
    )
    bench.run()
    bench.thinker._take = take  # type: ignore[method-assign]
    reply = bench.replies[name]
    assert reply.failure is None and reply.done
    assert seen == sequences[0, len(prompt.token_ids) :].tolist()[:TOKENS]
    assert reply.audio.shape == tuple(wave[0, 0].shape)
    np.testing.assert_allclose(reply.audio, wave[0, 0].numpy(), atol=1e-4)


@pytest.mark.parametrize("name", [*PROMPTS, "system-media"])
def test_logits_and_handed_over_states_equal_hf(bench: Bench, hf: Any, nano: Path, name: str) -> None:
    prompt = (PROMPTS | {"system-media": with_system_media})[name](bench)
    inputs = hf_inputs(prompt, load_preprocessor(nano))
    with torch.inference_mode():
        result = hf.thinker.generate(
            **inputs,
            max_new_tokens=1,
            do_sample=False,
            output_hidden_states=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
    captured: list[torch.Tensor] = []
    logits = bench.thinker.model.logits
    bench.thinker.model.logits = lambda hidden: captured.append(logits(hidden)) or captured[-1]  # type: ignore
    only_one = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
    bench.submit(f"states-{name}", prompt.token_ids, media=prompt.items, thinker=only_one)
    bench.run(only=(bench.thinker,))
    bench.thinker.model.logits = logits  # type: ignore[method-assign]
    torch.testing.assert_close(captured[0][0], result.logits[0][0], atol=1e-4, rtol=1e-4)
    handed = [item.arrays["hidden"] for item in bench.text_edge.queue if "hidden" in item.arrays]
    bench.run()
    config = bench.config
    ids = torch.tensor(prompt.token_ids)
    media = (ids == config.image_token_id) | (ids == config.audio_token_id) | (ids == config.video_token_id)
    starts = torch.cummax(torch.where(ids == config.im_start_token_id, torch.arange(len(ids)), 0), 0).values
    user = ids[starts + 1] == config.user_token_id
    assert config.talker is not None
    expected = result.hidden_states[0][config.talker.accept_hidden_layer][0, media & user]
    torch.testing.assert_close(torch.from_numpy(np.concatenate(handed)), expected, atol=1e-4, rtol=1e-4)
