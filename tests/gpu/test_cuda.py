"""The same stages on a CUDA device. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.stage_bench import Bench
from triptych.config.sampling import SamplingParams
from triptych.errors import ConfigError
from triptych.layers.recording import GraphRecorder
from triptych.stages.recorded_frames import RecordedFrames

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


needs_grouped = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="needs grouped products that do not ask the host",
)


def recorded_bench(nano: Path) -> Bench:
    return Bench(nano, devices="cuda", dtype="bfloat16", gpu_memory_utilization=0.05, enforce_eager=False)


@needs_grouped
def test_every_recorded_step_replays_what_it_computes(nano: Path) -> None:
    # Sums over experts are not the same bit for bit in two runs of one kernel.
    bench, near = recorded_bench(nano), {"atol": 0.05, "rtol": 0.05}
    with torch.inference_mode():
        for stage in (bench.thinker, bench.talker):
            decodes = stage.engine.runner.recorded
            assert decodes is not None
            for (rows, _), recording in decodes._recordings.items():
                x, *others = (held.clone() for held in recording.inputs)
                given = (torch.randn_like(x), *others)
                torch.testing.assert_close(recording(*given), decodes._step(rows, *given), **near)
        frames, chunks = bench.talker.residual_codes, bench.codec._recorded
        assert isinstance(frames, RecordedFrames) and chunks is not None
        for size, recording in frames._recordings.items():
            hidden, first, uniforms, _ = (held.clone() for held in recording.inputs)
            drawn = (torch.randn_like(hidden), first, torch.rand_like(uniforms), torch.arange(size).cuda() % 3 == 0)
            assert torch.equal(recording(*drawn).clone(), frames._frames(*drawn))
        for (_, _, opening), recording in chunks._recordings.items():
            codes, slots = (held.clone() for held in recording.inputs)
            codes.random_(0, bench.codec._model.config.codebook_size)
            bench.codec._state.reset(slots)
            replayed = recording(codes, slots).clone()
            bench.codec._state.reset(slots)
            torch.testing.assert_close(replayed, chunks._decode(opening, codes, slots), **near)


@needs_grouped
def test_requests_are_served_by_recorded_steps(nano: Path) -> None:
    bench = recorded_bench(nano)
    for seed in range(6):
        speech = SamplingParams(temperature=0.9, top_k=50, max_tokens=12 + 9 * seed, ignore_eos=True, seed=seed)
        bench.submit(f"r{seed}", bench.prompt(*range(40, 45 + 60 * seed)), thinker=TEXT, talker=speech)
    bench.run()
    for seed in range(6):
        reply = bench.replies[f"r{seed}"]
        assert (reply.failure, reply.frames, reply.num_tokens) == (None, 12 + 9 * seed, 12)
        assert np.isfinite(reply.audio).all() and np.abs(reply.audio).max() > 0


def test_a_step_that_waits_for_the_device_is_refused_by_its_cause() -> None:
    recorder = GraphRecorder(torch.device("cuda"))
    with pytest.raises(ConfigError, match="could not be recorded"):
        recorder(lambda: torch.full((1,), torch.ones(1, device="cuda").sum().item(), device="cuda"))
    replay, result = recorder(lambda: torch.ones(1, device="cuda") + 1)
    replay()
    assert result.item() == 2
