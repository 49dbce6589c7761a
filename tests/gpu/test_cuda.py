"""The same stages on a CUDA device. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.stage_bench import Bench
from triptych.config.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TEXT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, seed=0)
SPEECH = SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=1.05, seed=0)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_greedy_answer_equals_the_cpu(nano: Path, quantization: str | None) -> None:
    replies = {}
    for device in ("cpu", "cuda"):
        bench = Bench(nano, devices=device, gpu_memory_utilization=0.05, quantization=quantization)
        bench.submit("r", bench.prompt(*range(40, 75)), thinker=TEXT, talker=SPEECH)
        bench.run()
        replies[device] = bench.replies["r"]
    ours, reference = replies["cuda"], replies["cpu"]
    assert (ours.text, ours.frames, ours.speech_reason) == (reference.text, reference.frames, reference.speech_reason)
    np.testing.assert_allclose(ours.audio, reference.audio, atol=1e-3)


@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_batched_equals_alone(nano: Path, quantization: str | None) -> None:
    bench = Bench(nano, devices="cuda", gpu_memory_utilization=0.05, quantization=quantization)
    speech = [SamplingParams(temperature=0.9, top_k=50, max_tokens=12, seed=seed) for seed in range(6)]
    prompts = [bench.prompt(*range(40, 45 + 9 * seed)) for seed in range(6)]
    for seed in range(6):
        bench.submit(f"alone-{seed}", prompts[seed], thinker=TEXT, talker=speech[seed])
        bench.run()
    for seed in range(6):
        bench.submit(f"batch-{seed}", prompts[seed], thinker=TEXT, talker=speech[seed])
    bench.run()
    for seed in range(6):
        alone, batched = bench.replies[f"alone-{seed}"], bench.replies[f"batch-{seed}"]
        assert (batched.text, batched.frames) == (alone.text, alone.frames)
        np.testing.assert_allclose(batched.audio, alone.audio, atol=1e-3)


def test_replayed_equals_eager(nano: Path) -> None:
    # In bfloat16: grouped products of float32 read the groups' ends on the host, which no graph can.
    answers = []
    for eager in (True, False):
        bench = Bench(nano, devices="cuda", dtype="bfloat16", gpu_memory_utilization=0.05, enforce_eager=eager)
        for seed in range(6):
            params = SamplingParams(temperature=0.9, top_k=50, max_tokens=12, seed=seed)
            bench.submit(f"r{seed}", bench.prompt(*range(40, 45 + 9 * seed)), thinker=TEXT, talker=params)
        bench.run()
        answers.append({name: (reply.text, reply.frames) for name, reply in bench.replies.items()})
        assert all(reply.failure is None and reply.frames for reply in bench.replies.values())
    assert answers[0] == answers[1]
