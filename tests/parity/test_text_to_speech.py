"""Text to speech against Transformers, on tiny weights in float32: tokens, codes, waveform, logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.stage_bench import Bench
from triptych.config.sampling import SamplingParams
from triptych.models.qwen3_omni.bridge import talker_prompt_token_ids

WORDS = list(range(40, 75))


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "compiled"])
def bench(nano: Path, request: pytest.FixtureRequest) -> Bench:
    return Bench(nano, talker={"enforce_eager": request.param}, code2wav={"enforce_eager": request.param})


def hf_speech(hf: Any, prompt: list[int], *, tokens: int, frames: int, speaker: str) -> tuple[list[int], torch.Tensor]:
    """Greedy Transformers, one token and one frame longer than ours: it neither speaks the last token nor decodes the
    last frame of an answer that a limit ends."""
    sequences, wave = hf.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        speaker=speaker,
        thinker_max_new_tokens=tokens + 1,
        thinker_do_sample=False,
        thinker_eos_token_id=None,
        talker_do_sample=False,
        talker_temperature=1.0,
        talker_max_new_tokens=frames + 1,
    )
    return sequences[0, len(prompt) :].tolist()[:tokens], wave[0, 0]


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
@pytest.mark.parametrize("turns", [1, 3])
def test_greedy_answer_equals_hf(bench: Bench, hf_nano: Any, turns: int) -> None:
    prompt = bench.prompt(*WORDS, turns=turns)
    speaker = next(iter(bench.config.talker.speaker_id)) if bench.config.talker else ""
    tokens, frames = 12, 25
    expected_tokens, expected_wave = hf_speech(hf_nano, prompt, tokens=tokens, frames=frames, speaker=speaker)
    seen: list[int] = []
    take = bench.thinker._take
    bench.thinker._take = lambda request, token, logprob: (seen.append(token), take(request, token, logprob))[1]  # type: ignore
    bench.submit(
        f"greedy-{turns}",
        prompt,
        thinker=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0),
        talker=SamplingParams(temperature=0.0, max_tokens=frames, repetition_penalty=1.05, seed=0),
    )
    bench.run()
    bench.thinker._take = take  # type: ignore[method-assign]
    reply = bench.replies[f"greedy-{turns}"]
    assert reply.done and reply.failure is None
    assert seen == expected_tokens
    assert reply.audio.shape == tuple(expected_wave.shape)
    np.testing.assert_allclose(reply.audio, expected_wave.numpy(), atol=1e-4)


def test_thinker_logits_equal_hf(bench: Bench, hf_nano: Any) -> None:
    prompt = bench.prompt(*WORDS, *WORDS, *WORDS)
    with torch.inference_mode():
        expected = hf_nano.thinker(input_ids=torch.tensor([prompt])).logits[0, -1]
    captured: list[torch.Tensor] = []
    logits = bench.thinker.model.logits
    bench.thinker.model.logits = lambda hidden: captured.append(logits(hidden)) or captured[-1]  # type: ignore
    bench.submit("logits", prompt, speak=False, thinker=SamplingParams(temperature=0.0, max_tokens=1, seed=0))
    bench.run()
    bench.thinker.model.logits = logits  # type: ignore[method-assign]
    torch.testing.assert_close(captured[0][0], expected, atol=1e-4, rtol=1e-4)


def test_talker_sees_user_turns_and_the_last_header_only(bench: Bench) -> None:
    config = bench.config
    newline = bench.thinker.tokenizer.encode("\n", add_special_tokens=False).ids
    start, end = config.im_start_token_id, [config.im_end_token_id, *newline]
    system = [start, config.system_token_id, *newline, 50, *end]
    user = [start, config.user_token_id, *newline, 60, 61, *end]
    answer = [start, config.assistant_token_id, *newline, 70, *end]
    header = [start, config.assistant_token_id, *newline]
    kept = talker_prompt_token_ids([*system, *user, *answer, *user, *header], config)
    assert list(kept) == [*user, *user, *header]
    with pytest.raises(ValueError, match="assistant header"):
        talker_prompt_token_ids([*system, *user], config)
