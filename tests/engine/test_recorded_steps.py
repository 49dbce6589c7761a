"""Recorded steps, replayed == computed eagerly, bit for bit.

A CPU has no graphs. Here a replay calls the recorded step again, with the inputs that the recording holds and into the
result that it gave: what is padded, what lies where and what is stale is then as with a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.bench_media import clip, picture, video
from tests.stage_bench import Bench
from triptych.config.sampling import SamplingParams
from triptych.layers.recording import Recording, Replay
from triptych.stages import codec_stage, talker_stage, thinker_stage

TEXT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, seed=0)
STAGES = (thinker_stage, talker_stage, codec_stage)


class Calls:
    """Records a step as a call of it, and counts recordings and replays."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        self.recordings += 1
        result = step().clone()

        def replay() -> None:
            self.replays += 1
            result.copy_(step())

        return replay, result


def recorded_bench(monkeypatch: pytest.MonkeyPatch, model: Path, **config: Any) -> tuple[Bench, list[Calls]]:
    """A bench whose three stages record their steps."""
    recorders = [Calls() for _ in STAGES]
    for stage, recorder in zip(STAGES, recorders, strict=True):
        monkeypatch.setattr(stage, "stage_recorder", lambda config, device, recorder=recorder: recorder)
    bench = Bench(model, **config)
    monkeypatch.undo()
    return bench, recorders


def speech(seed: int) -> SamplingParams:
    """Greedy in some requests."""
    temperature = 0.9 if seed % 3 else 0.0
    return SamplingParams(temperature=temperature, top_k=50, max_tokens=40 - 5 * seed, ignore_eos=True, seed=seed)


def replies(bench: Bench, count: int, *, late: int = 0) -> dict[str, tuple[str, int, bytes]]:
    """Of `count` requests of different lengths; the last `late` come when the others have run for a while."""
    prompts = [bench.prompt(*range(40, 44 + 45 * (seed % 4))) for seed in range(count)]
    for seed in range(count):
        if seed == count - late:
            for _ in range(6):
                for stage in bench.stages:
                    stage.poll_inputs()
                    if stage.has_work():
                        stage.step()
        bench.submit(f"r{seed}", prompts[seed], thinker=TEXT, talker=speech(seed))
    bench.run()
    found = {name: (reply.text, reply.frames, b"".join(reply.chunks)) for name, reply in bench.replies.items()}
    assert len(found) == count and all(frames and chunks for _, frames, chunks in found.values())
    return found


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("count", [1, 5])
def test_replayed_equals_eager(nano: Path, monkeypatch: pytest.MonkeyPatch, batch_invariant: bool, count: int) -> None:
    config = {"max_num_seqs": 6, "batch_invariant": batch_invariant, "enforce_eager": True}
    bench, recorders = recorded_bench(monkeypatch, nano, **config)
    recordings = [recorder.recordings for recorder in recorders]
    assert all(recordings)
    ours = replies(bench, count, late=count // 2)
    assert all(recorder.replays > 3 for recorder in recorders)
    assert [recorder.recordings for recorder in recorders] == recordings  # none while requests are served
    eager = replies(Bench(nano, **config), count, late=count // 2)
    if batch_invariant:
        assert ours == eager
        return
    # Padding changes the number of rows, and with it how products round.
    for name, (text, frames, audio) in eager.items():
        assert ours[name][:2] == (text, frames)
        np.testing.assert_allclose(
            np.frombuffer(ours[name][2], np.float32), np.frombuffer(audio, np.float32), atol=1e-3
        )


def test_batched_equals_alone_where_steps_are_replayed(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _ = recorded_bench(monkeypatch, nano, max_num_seqs=6)
    together = replies(bench, 6)
    alone = {}
    for seed in range(6):
        bench.submit("alone", bench.prompt(*range(40, 44 + 45 * (seed % 4))), thinker=TEXT, talker=speech(seed))
        bench.run()
        reply = bench.replies.pop("alone")
        alone[f"r{seed}"] = (reply.text, reply.frames, b"".join(reply.chunks))
    assert together == alone


def test_prompts_with_media_are_computed_beside_replayed_steps(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    film = video(3, frames=26, height=96, width=64)
    parts = [(40, picture(1, 128, 96), 41), (42, clip(2, 930), 43, 44), (45, film, 46, picture(4, 96, 96)), (47, 48)]
    found = []
    for recorded in (True, False):
        bench = recorded_bench(monkeypatch, nano)[0] if recorded else Bench(nano)
        for index, part in enumerate(parts):
            prompt = bench.media_prompt(*part)
            text = SamplingParams(temperature=1.0, max_tokens=6 + 5 * index, ignore_eos=True, seed=index)
            bench.submit(f"r{index}", prompt.token_ids, media=prompt.items, thinker=text, talker=speech(index))
        bench.run()
        found.append({name: (reply.text, reply.frames, reply.chunks) for name, reply in bench.replies.items()})
        assert all(reply.failure is None and reply.frames for reply in bench.replies.values())
    assert found[0] == found[1]


def test_a_recording_refuses_another_shape_than_its_own() -> None:
    recording = Recording(Calls(), lambda x, y: x + y, (torch.zeros(4, 2), torch.zeros(4, 2)))
    assert torch.equal(recording(torch.ones(4, 2), torch.ones(4, 2)), torch.full((4, 2), 2.0))
    with pytest.raises(ValueError, match=r"recorded for an input of \(4, 2\), not of \(3, 2\)"):
        recording(torch.ones(4, 2), torch.ones(3, 2))


def test_of_independent_rows_there_may_be_fewer_than_were_recorded() -> None:
    recording = Recording(Calls(), lambda x: 2 * x, (torch.zeros(4, 2),), whole=False)
    recording(torch.ones(4, 2))
    assert recording(torch.full((3, 2), 5.0)).tolist() == [[10.0, 10.0]] * 3 + [[2.0, 2.0]]
    with pytest.raises(ValueError, match=r"recorded for an input of \(4, 2\), not of \(5, 2\)"):
        recording(torch.ones(5, 2))
