"""The compiled vocoder: what its eager twin computes, and no sample by the cut of a stream or by its company."""

from __future__ import annotations

import ctypes
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.stage_bench import Bench
from triptych.config.sampling import SamplingParams
from triptych.layers.compiled import compiled
from triptych.models.qwen3_omni.code2wav import Code2Wav
from triptych.models.qwen3_omni.compiled_vocoder import compiled_code
from triptych.models.qwen3_omni.config import Code2WavConfig
from triptych.stages import codec_stage
from triptych.stages.codec_stream import Chunk
from triptych.streaming.state import StreamState

pytestmark = pytest.mark.skipif(compiled_code() is None, reason="there is no C compiler here")

SMALL = Code2WavConfig(
    codebook_size=32,
    num_quantizers=4,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    sliding_window=9,
    decoder_dim=32,
)


def changed(**values: object) -> Code2WavConfig:
    return msgspec.structs.replace(SMALL, **values)


CONFIGS = {
    "small": SMALL,
    "as bench": changed(hidden_size=64, head_dim=16, intermediate_size=128, decoder_dim=96, sliding_window=72),
    "odd widths": changed(hidden_size=31, head_dim=6, intermediate_size=45, decoder_dim=112, sliding_window=20),
    "other rates": changed(upsample_rates=(7, 2, 6), upsampling_ratios=(3,), decoder_dim=104),
    "no memory": changed(sliding_window=1, upsampling_ratios=(2, 1), num_key_value_heads=1),
    "a memory of one": changed(sliding_window=2, num_hidden_layers=1, head_dim=2, num_attention_heads=2),
    "one channel": changed(decoder_dim=4, upsample_rates=(3, 5), hidden_size=8),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def vocoder(config: Code2WavConfig, *, eager: bool, exact: bool = True) -> Code2Wav:
    """With random weights, the same each time, that keep the signal alive; `exact`: those of a bfloat16 checkpoint."""
    generator = torch.Generator().manual_seed(0)
    model = Code2Wav(config)
    for name, weight in model.named_parameters():
        deviation = 0.3 if weight.ndim < 2 or "embedding" in name else 0.7 * weight[0].numel() ** -0.5
        values = torch.randn(weight.shape, generator=generator) * deviation + (1.0 if "norm" in name else 0.0)
        weight.copy_(values.bfloat16() if exact else values)
    model.conv_out.weight.mul_(0.125)
    model.prepare(eager=eager)
    assert (model.compiled is None) == eager
    return model


def codes_of(config: Code2WavConfig, frames: int, batch: int = 1, seed: int = 1) -> Tensor:
    shape = (batch, config.num_quantizers, frames)
    return torch.randint(0, config.codebook_size, shape, generator=torch.Generator().manual_seed(seed))


def new_state(model: Code2Wav, slots: int = 4) -> StreamState:
    return StreamState(model, slots, device="cpu", dtype=torch.float32)


def decode(model: Code2Wav, state: StreamState, codes: Tensor, sizes: Sequence[int], slots: Sequence[int]) -> Tensor:
    pieces = [
        model(chunk, state, torch.tensor(slots), first=index == 0)
        for index, chunk in enumerate(torch.split(codes, list(sizes), dim=-1))
    ]
    return torch.cat(pieces, dim=-1)


def random_cut(frames: int, dice: random.Random, largest: int) -> list[int]:
    sizes: list[int] = []
    while (left := frames - sum(sizes)) > 0:
        sizes.append(min(left, dice.choice((1, 1, 2, 3, dice.randint(1, largest)))))
    return sizes


@configs
@pytest.mark.parametrize("exact", [True, False])
def test_it_computes_what_its_eager_twin_does(config: Code2WavConfig, exact: bool) -> None:
    ours, twin = (vocoder(config, eager=eager, exact=exact) for eager in (False, True))
    codes = codes_of(config, 90, batch=2)
    expected = twin(codes)
    assert expected.square().mean().sqrt() > 0.01, "silence would prove nothing"
    torch.testing.assert_close(ours(codes), expected, atol=2e-5, rtol=0.0)
    sizes = [1, 4, 40, 3, 42]
    torch.testing.assert_close(
        decode(ours, new_state(ours), codes, sizes, [2, 0]),
        decode(twin, new_state(twin), codes, sizes, [2, 0]),
        atol=2e-5,
        rtol=0.0,
    )


@configs
def test_every_cut_of_a_stream_gives_the_same_bits(config: Code2WavConfig) -> None:
    model = vocoder(config, eager=False)
    codes = codes_of(config, 100)
    whole = model(codes)
    dice, state = random.Random(0), new_state(model)
    cuts = [[1] * 100, [100], [33, 32, 31, 4], [4] * 25, *(random_cut(100, dice, 70) for _ in range(10))]
    for sizes in cuts:
        assert torch.equal(decode(model, state, codes, sizes, [dice.randrange(4)]), whole), sizes


@configs
def test_a_stream_is_the_same_alone_and_in_any_batch(config: Code2WavConfig) -> None:
    model = vocoder(config, eager=False)
    codes = codes_of(config, 9, batch=13)
    together = decode(model, new_state(model, 13), codes, [2, 6, 1], range(13))
    for size in (1, 2, 5):
        state = new_state(model, 13)
        for start in range(0, 13, size):
            rows = range(start, min(start + size, 13))
            assert torch.equal(decode(model, state, codes[rows.start : rows.stop], [2, 6, 1], rows), together[rows])
    assert torch.equal(model(codes), together)


def test_streams_of_any_age_share_calls_and_slots_are_used_again() -> None:
    model, dice = vocoder(SMALL, eager=False), random.Random(3)
    streams = [codes_of(SMALL, dice.randint(1, 40), seed=seed)[0] for seed in range(12)]
    whole = [model(codes[None])[0] for codes in streams]
    state, waiting, slots = new_state(model), list(range(12)), dict.fromkeys(range(4), -1)
    done, pieces = [0] * 12, [[] for _ in range(12)]  # type: list[int], list[list[Tensor]]
    while waiting or any(stream >= 0 for stream in slots.values()):
        for slot, stream in slots.items():
            if stream < 0 and waiting:
                slots[slot] = waiting.pop()
        size = dice.randint(1, 5)
        for first in (True, False):
            ready = {
                slot: stream
                for slot, stream in slots.items()
                if stream >= 0 and (done[stream] == 0) == first and streams[stream].shape[1] - done[stream] >= size
            }
            if not ready:
                continue
            chunk = torch.stack([streams[stream][:, done[stream] : done[stream] + size] for stream in ready.values()])
            for stream, samples in zip(
                ready.values(), model(chunk, state, torch.tensor([*ready]), first=first), strict=True
            ):
                pieces[stream].append(samples)
                done[stream] += size
            break
        slots = {s: -1 if i >= 0 and done[i] == streams[i].shape[1] else i for s, i in slots.items()}
    for expected, parts in zip(whole, pieces, strict=True):
        assert torch.equal(torch.cat(parts), expected)


def test_a_stream_that_is_not_finite_spoils_no_other() -> None:
    config = changed(hidden_size=31, head_dim=6)
    model, codes = vocoder(config, eager=False), codes_of(config, 8, batch=2)
    expected = decode(model, new_state(model), codes, [4, 4], [0, 1])
    state = new_state(model)
    decode(model, state, codes[..., :4], [4], [0, 1])
    [history] = state._histories.values()
    history[0] = torch.nan
    later = model(codes[..., 4:], state, torch.tensor([0, 1]), first=False)
    assert bool(later[0].isnan().any()) and torch.equal(later[1], expected[1, -later.shape[1] :])
    assert torch.equal(decode(model, state, codes, [4, 4], [0, 1]), expected)


def test_codes_and_slots_out_of_range_change_nothing() -> None:
    model = vocoder(SMALL, eager=False)
    state, codes, slots = new_state(model), codes_of(SMALL, 3, batch=2), torch.tensor([0, 3])
    model(codes, state, slots, first=True)
    saved = state.snapshot(0)
    bad = codes.clone()
    bad[1, 2, 1] = SMALL.codebook_size
    for wrong, where in ((bad, slots), (-codes - 1, slots), (codes, slots + 2), (codes, slots - 1)):
        with pytest.raises(IndexError, match=r"codes must be in \[0, 32\) and slots in \[0, 5\)"):
            model(wrong, state, where, first=False)
    for before, after in zip(saved, state.snapshot(0), strict=True):
        assert torch.equal(before, after)


@configs
def test_its_state_is_as_large_as_its_twins(config: Code2WavConfig) -> None:
    ours, twin = (new_state(vocoder(config, eager=eager)) for eager in (False, True))
    assert ours.nbytes == twin.nbytes


def test_weights_that_are_laid_out_anew_are_given_up() -> None:
    model = vocoder(SMALL, eager=False)
    assert {name for name, _ in model.named_parameters()} == {"code_embedding", "norm"}


FUNCTIONS = """
#include "columns.h"
void snakes(const float *x, float half_turns, float magnitude, float *y, int columns) {
    snake(x, half_turns, magnitude, y, columns);
}
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "functions.c"
    source.write_text(FUNCTIONS)
    library = compiled(source)
    assert library is not None
    yield library
    compiled.cache_clear()


def snake(library: ctypes.CDLL, x: NDArray[np.float32], frequency: float, magnitude: float) -> NDArray[np.float32]:
    y = np.empty_like(x)
    library.snakes(
        ctypes.c_void_p(x.ctypes.data),
        ctypes.c_float(frequency / np.pi),
        ctypes.c_float(magnitude),
        ctypes.c_void_p(y.ctypes.data),
        len(x),
    )
    return y


@pytest.mark.parametrize("reach", [1e-3, 1.0, 10.0, 1e3, 1e5])
@pytest.mark.parametrize("frequency", [1.0, 0.37, 21.3])
def test_the_snake_is_exact_as_far_as_a_float_tells_its_angle(
    functions: ctypes.CDLL, reach: float, frequency: float
) -> None:
    x = (np.linspace(-reach, reach, 1 << 16) / frequency).astype(np.float32)
    exact = np.sin(x.astype(np.float64) * frequency) ** 2
    # Of a float angle the last bit is worth 6e-8 of it.
    tolerance = 1.5e-7 + 1.2e-7 * np.abs(x * frequency)
    assert np.all(np.abs(snake(functions, x, frequency, 1.0) - x - exact) <= tolerance + 1.2e-7 * np.abs(x))


def test_the_snake_of_what_is_no_number_is_none_and_of_what_is_huge_is_bounded(functions: ctypes.CDLL) -> None:
    values = [np.nan, np.inf, -np.inf, 0.0, 1e8, -3e12, 1e30, 3e38] * 2
    y = snake(functions, np.array(values, np.float32), 1.0, 1.0)
    assert np.isnan(y[:3]).all() and y[3] == 0.0
    np.testing.assert_array_equal(y[4:8], np.array(values[4:8], np.float32))


def test_speech_is_the_same_alone_and_in_a_batch(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    bench = Bench(nano, code2wav={"enforce_eager": False})
    assert bench.codec._model.compiled is not None
    decode_batch = bench.codec._decode

    def counted(batch: list[Chunk]) -> NDArray[np.float32]:
        taken.append(len(batch))
        return decode_batch(batch)

    monkeypatch.setattr(bench.codec, "_decode", counted)
    prompts = [bench.prompt(*range(30, 32 + 7 * index)) for index in range(6)]
    text = SamplingParams(temperature=1.0, max_tokens=12, seed=3, ignore_eos=True)
    speech = [SamplingParams(temperature=0.9, max_tokens=10 + 3 * index, seed=index) for index in range(6)]
    for index, prompt in enumerate(prompts):
        bench.submit(f"alone-{index}", prompt, thinker=text, talker=speech[index])
        bench.run()
    assert {*taken} == {1}
    for index, prompt in enumerate(prompts):
        bench.submit(f"batch-{index}", prompt, thinker=text, talker=speech[index])
    bench.run()
    assert max(taken) > 1
    for index in range(6):
        alone, batched = bench.replies[f"alone-{index}"], bench.replies[f"batch-{index}"]
        assert alone.done and alone.frames == batched.frames
        np.testing.assert_array_equal(alone.audio, batched.audio)


def test_without_a_compiler_it_stays_eager_and_says_so_once(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "/there/is/none")
    compiled.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            stages = [Bench(nano, code2wav={"enforce_eager": False}).codec for _ in range(2)]
    finally:
        compiled.cache_clear()
    assert [record.message.startswith("code2wav.c is not compiled") for record in caplog.records] == [True]
    assert [(stage._model.compiled, stage._most(4)) for stage in stages] == [(None, 1)] * 2


def test_a_call_takes_no_more_streams_than_have_so_many_frames(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_stage, "STEP_FRAMES", 9)
    stage = Bench(nano, code2wav={"enforce_eager": False, "max_num_seqs": 6}).codec
    assert [stage._most(frames) for frames in (0, 1, 2, 4, 9, 25)] == [6, 6, 4, 2, 1, 1]
    for invariant, most in ((True, 1), (False, 6)):
        stage = Bench(nano, code2wav={"batch_invariant": invariant, "max_num_seqs": 6}).codec
        assert [stage._most(frames) for frames in (0, 1, 25)] == [most] * 3
