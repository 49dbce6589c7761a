"""Recorded steps, replayed == computed eagerly, bit for bit.

A CPU has no graphs. Here a replay calls the recorded step again, with the inputs that the recording holds and into the
result that it gave: what is padded, what lies where and what is stale is then as with a graph. What a graph cannot
hold, a wait for the device above all, is looked for on the meta device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.bench_media import clip, picture, video
from tests.stage_bench import Bench
from triptych.config.sampling import SamplingParams
from triptych.config.schema import StageConfig
from triptych.engine.buckets import decode_buckets
from triptych.engine.kv_cache import KVCache
from triptych.engine.recorded_decodes import RecordedDecodes
from triptych.errors import ConfigError
from triptych.layers.recording import Recording, Replay
from triptych.models.qwen3_omni.backbone import Backbone
from triptych.models.qwen3_omni.code2wav import Code2Wav
from triptych.models.qwen3_omni.config import load_config
from triptych.models.qwen3_omni.talker import Talker
from triptych.stages import codec_stage, loading, talker_stage, thinker_stage
from triptych.stages.cadence import Cadence
from triptych.stages.recorded_frames import RecordedFrames
from triptych.stages.recorded_vocoder import RecordedVocoder
from triptych.streaming.state import StreamState

TEXT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, seed=0)
STAGES = (thinker_stage, talker_stage, codec_stage)


class Calls:
    """Records a step as a call of it, and counts replays.

    All steps of a recorder share memory, so a replay spoils the results of the others.
    """

    def __init__(self) -> None:
        self.results: list[Tensor] = []
        self.replays = 0

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        result = step().clone()
        self.results.append(result)

        def replay() -> None:
            self.replays += 1
            for other in self.results:
                other.fill_(math.nan if other.is_floating_point() else -1)
            result.copy_(step())

        return replay, result


def recorded_bench(monkeypatch: pytest.MonkeyPatch, model: Path, **config: Any) -> tuple[Bench, list[Calls]]:
    """A bench whose three stages record their steps."""
    recorders = [Calls() for _ in STAGES]
    for stage, recorder in zip(STAGES, recorders, strict=True):
        monkeypatch.setattr(stage, "stage_recorder", lambda *args, recorder=recorder: recorder)
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
    recordings = [len(recorder.results) for recorder in recorders]
    assert all(recordings)
    ours = replies(bench, count, late=count // 2)
    assert all(recorder.replays > 3 for recorder in recorders)
    assert [len(recorder.results) for recorder in recorders] == recordings  # none while requests are served
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


def test_shapes_that_are_not_recorded_are_computed_eagerly(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_most_blocks", lambda cache: 64)  # four rows of a short context
    bench, recorders = recorded_bench(monkeypatch, nano, max_num_seqs=6)
    ours = replies(bench, 6, late=4)
    assert len(recorders[0].results) == 1 and recorders[0].replays
    assert ours == replies(Bench(nano, max_num_seqs=6), 6, late=4)


class Watch(TorchDispatchMode):
    """Notes what no graph can hold: numbers on the host, shapes that depend on them, and tensors of the CPU."""

    forbidden = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "bincount", "lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.bad: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        self.seen[name] += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        by_mask = name.startswith("aten.index") and any(tensor.dtype == torch.bool for tensor in tensors[1:])
        if by_mask or any(part in name for part in self.forbidden) or any(t.device.type == "cpu" for t in tensors):
            self.bad[name] += 1
        return out


class Watched:
    """Records steps by looking at their second run: the first may set up what lasts."""

    def __init__(self) -> None:
        self.watches: list[Watch] = []

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        step()
        with Watch() as watch:
            result = step()
        self.watches.append(watch)
        return lambda: None, result


def on_meta(build: Callable[[], Module]) -> Module:
    """A model whose weights have shapes alone, so that it takes the ways of a device that is no CPU."""
    with torch.device("meta"):
        model = build()
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(weight.data.bfloat16(), requires_grad=False))
    return model


@pytest.mark.parametrize("row_tile", [1, 4])
def test_no_recorded_step_asks_the_host(nano: Path, row_tile: int) -> None:
    config, recorder, counts = load_config(nano), Watched(), []
    assert config.talker is not None and config.code2wav is not None
    vocoder_config = config.code2wav
    talker, thinker = on_meta(lambda: Talker(config)), on_meta(lambda: Backbone(config.thinker))
    vocoder = on_meta(lambda: Code2Wav(vocoder_config))
    assert isinstance(talker, Talker) and isinstance(thinker, Backbone) and isinstance(vocoder, Code2Wav)
    with torch.no_grad():
        talker.prepare(row_tile=row_tile)
        thinker.prepare(row_tile)
        vocoder.prepare()
    for layers, decoder in ((thinker, config.thinker), (talker.backbone, config.talker.text)):
        cache = KVCache(
            layers=decoder.num_hidden_layers,
            num_blocks=40,
            block_size=16,
            kv_heads=decoder.num_key_value_heads,
            head_dim=decoder.head_dim,
            dtype=torch.bfloat16,
            device=torch.device("meta"),
        )
        buckets = decode_buckets(max_rows=6, row_tile=row_tile, max_blocks=64)
        RecordedDecodes(layers, cache, buckets, recorder, hidden_size=decoder.hidden_size)
        counts.append(len(recorder.watches))
    RecordedFrames(talker, recorder, max_frames=6, row_tile=row_tile)
    counts.append(len(recorder.watches))
    state = StreamState(vocoder, 4, device="meta", dtype=torch.bfloat16, recorded=True)
    RecordedVocoder(vocoder, state, Cadence(4, 25), recorder, max_batch=4)
    counts.append(len(recorder.watches))
    assert 0 < counts[0] < counts[1] < counts[2] < counts[3]
    assert all(sum(watch.seen.values()) > 100 for watch in recorder.watches)
    assert not sum((watch.bad for watch in recorder.watches), Counter())


@pytest.mark.parametrize(("dtype", "capability"), [(torch.float32, (9, 0)), (torch.bfloat16, (8, 6))])
def test_experts_that_cannot_be_recorded_are_refused(
    nano: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    stage = StageConfig(stage_id=0, stage="thinker", process="one", devices="cuda", enforce_eager=False)
    with pytest.raises(ConfigError, match=r"stages\[0\]\.enforce_eager: .* cannot be recorded: .*; write true"):
        loading.stage_recorder(stage, torch.device("cuda"), dtype, load_config(nano).thinker)


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
