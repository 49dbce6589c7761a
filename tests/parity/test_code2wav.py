"""The vocoder against Transformers: one-shot, and as streams in every cut."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from triptych.errors import CheckpointError
from triptych.models.qwen3_omni.code2wav import Code2Wav
from triptych.models.qwen3_omni.config import Code2WavConfig
from triptych.streaming.state import StreamState

TOLERANCE = 1e-4
CONFIG = Code2WavConfig(
    codebook_size=32,
    num_quantizers=4,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    decoder_dim=32,
)
NARROW_WINDOW = msgspec.structs.replace(CONFIG, sliding_window=6)
OTHER_RATES = msgspec.structs.replace(CONFIG, upsample_rates=(3, 2), upsampling_ratios=(4,), num_key_value_heads=1)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def reference(config: Code2WavConfig, seed: int = 0) -> Any:
    """Transformers' vocoder with weights that keep the signal alive: its own initial scales would hide errors."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    values = msgspec.structs.asdict(config)
    rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    model = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**values, rope_parameters=rope)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            mean, deviation = 1.0, 0.2
        elif name.endswith(("scale", "gamma")):
            mean, deviation = 0.0, 0.5
        elif weight.ndim < 2:  # biases, and the exponents of Snake
            mean, deviation = 0.0, 0.2
        elif "code_embedding" in name:
            mean, deviation = 0.0, 1.0
        else:
            mean, deviation = 0.0, 0.7 / math.sqrt(weight[0].numel())
        weight.copy_(torch.randn(weight.shape, generator=generator) * deviation + mean)
    model.decoder[-1].conv.weight.mul_(0.1)
    return model


def ours(config: Code2WavConfig, hf: Any, *, eager: bool = True) -> Code2Wav:
    """Our vocoder with the weights of `hf`, placed as `placements` says, each exactly once."""
    with torch.device("meta"):
        model = Code2Wav(config)
    model.to_empty(device="cpu")
    missing = {f"code2wav.{name}": tensor for name, tensor in hf.state_dict().items()}
    targets = dict(model.named_parameters())
    filled = dict.fromkeys(targets, 0)
    for place in model.placements("per_expert"):
        tensor = missing.pop(place.source)
        assert tensor.shape == place.shape
        targets[place.target][place.start : place.start + place.shape[0]] = tensor
        filled[place.target] += tensor.numel()
    assert not missing
    assert filled == {name: target.numel() for name, target in targets.items()}
    model.prepare(eager=eager)
    return model


Pair = tuple[Any, Code2Wav]


both_twins = pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "compiled"])
def pair(request: pytest.FixtureRequest) -> Pair:
    with torch.inference_mode():
        hf = reference(CONFIG)
        return hf, ours(CONFIG, hf, eager=request.param)


def new_state(model: Code2Wav, num_slots: int = 4) -> StreamState:
    return StreamState(model, num_slots, device="cpu", dtype=torch.float32)


def random_codes(config: Code2WavConfig, frames: int, batch: int = 1, seed: int = 1) -> Tensor:
    shape = (batch, config.num_quantizers, frames)
    return torch.randint(0, config.codebook_size, shape, generator=torch.Generator().manual_seed(seed))


def decode(model: Code2Wav, state: StreamState, codes: Tensor, sizes: Sequence[int], slots: Sequence[int]) -> Tensor:
    rows, pieces = torch.tensor(slots), []
    for index, chunk in enumerate(torch.split(codes, list(sizes), dim=-1)):
        wav = model(chunk, state, rows, first=index == 0)
        assert wav.shape == (len(slots), model.num_samples(chunk.shape[-1], first=index == 0))
        pieces.append(wav)
    return torch.cat(pieces, dim=-1)


def even(frames: int, size: int) -> list[int]:
    return [min(size, frames - start) for start in range(0, frames, size)]


def worst(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max())


@pytest.mark.parametrize("frames", [1, 2, 7, 40])
def test_one_shot_equals_transformers(pair: Pair, frames: int) -> None:
    hf, model = pair
    codes = random_codes(CONFIG, frames, batch=2)
    expected = hf(codes)[:, 0]
    actual = model(codes)
    assert actual.dtype == torch.float32
    assert actual.shape == (2, 1920 * frames - 555)
    assert worst(actual, expected) < TOLERANCE


def test_the_reference_signal_is_loud_but_not_clipped(pair: Pair) -> None:
    wav = pair[0](random_codes(CONFIG, 40))
    assert 0.03 < float(wav.square().mean().sqrt()) < 0.5
    assert float((wav.abs() == 1).float().mean()) < 0.01


@both_twins
def test_samples_are_clamped_like_transformers(eager: bool) -> None:
    hf = reference(CONFIG)
    hf.decoder[-1].conv.weight.mul_(50)
    codes = random_codes(CONFIG, 6)
    actual = ours(CONFIG, hf, eager=eager)(codes)
    assert float(actual.abs().max()) == 1.0
    assert float((actual.abs() == 1).float().mean()) > 0.1
    assert worst(actual, hf(codes)[:, 0]) < 50 * TOLERANCE


@pytest.mark.parametrize("config", [NARROW_WINDOW, OTHER_RATES], ids=["narrow window", "other rates, grouped heads"])
@both_twins
def test_other_configs_equal_transformers_in_every_chunk_size(config: Code2WavConfig, eager: bool) -> None:
    hf = reference(config)
    model = ours(config, hf, eager=eager)
    codes = random_codes(config, 12)
    expected = hf(codes)[:, 0]
    assert worst(model(codes), expected) < TOLERANCE
    for size in range(1, 13):
        assert worst(decode(model, new_state(model), codes, even(12, size), [0]), expected) < TOLERANCE


def test_every_chunk_size_equals_one_shot(pair: Pair) -> None:
    hf, model = pair
    codes = random_codes(CONFIG, 13)
    expected = hf(codes)[:, 0]
    for size in range(1, 14):
        assert worst(decode(model, new_state(model), codes, even(13, size), [2]), expected) < TOLERANCE


def test_random_cuts_equal_one_shot(pair: Pair) -> None:
    hf, model = pair
    codes = random_codes(CONFIG, 60)
    expected = hf(codes)[:, 0]
    dice = random.Random(0)
    state = new_state(model)
    for _ in range(10):
        sizes: list[int] = []
        while (left := 60 - sum(sizes)) > 0:
            sizes.append(min(left, dice.choice((1, 1, 2, 3, 4, 9, 25))))
        assert worst(decode(model, state, codes, sizes, [dice.randrange(4)]), expected) < TOLERANCE


@pytest.mark.parametrize("size", [1, 3, 4, 25])
def test_a_stream_far_longer_than_the_window_equals_one_shot(pair: Pair, size: int) -> None:
    hf, model = pair
    codes = random_codes(CONFIG, 250)
    expected = hf(codes)[:, 0]
    actual = decode(model, new_state(model), codes, even(250, size), [1])
    assert worst(actual, expected) < TOLERANCE
    assert actual.shape[-1] == 1920 * 250 - 555


def test_interleaved_streams_do_not_touch_each_other(pair: Pair) -> None:
    hf, model = pair
    state = new_state(model)
    dice = random.Random(1)
    streams = [random_codes(CONFIG, frames, seed=frames)[0] for frames in (9, 17, 23, 30)]
    done, pieces = [0] * 4, [[] for _ in range(4)]  # type: list[int], list[list[Tensor]]
    while any(done[slot] < codes.shape[-1] for slot, codes in enumerate(streams)):
        slot = dice.choice([slot for slot, codes in enumerate(streams) if done[slot] < codes.shape[-1]])
        chunk = streams[slot][None, :, done[slot] : done[slot] + dice.randint(1, 5)]
        pieces[slot].append(model(chunk, state, torch.tensor([slot]), first=done[slot] == 0))
        done[slot] += chunk.shape[-1]
    for codes, parts in zip(streams, pieces, strict=True):
        assert worst(torch.cat(parts, dim=-1), hf(codes[None])[:, 0]) < TOLERANCE


def test_a_slot_is_clean_for_its_next_stream(pair: Pair) -> None:
    _, model = pair
    codes = random_codes(CONFIG, 10)
    used = new_state(model)
    decode(model, used, random_codes(CONFIG, 90, seed=5), even(90, 25), [1])
    fresh = decode(model, new_state(model), codes, [1, 4, 5], [1])
    assert torch.equal(decode(model, used, codes, [1, 4, 5], [1]), fresh)
    used.reset(torch.tensor([1]))
    assert torch.equal(decode(model, used, codes, [1, 4, 5], [1]), fresh)


def test_a_batch_of_streams_at_different_ages_equals_each_alone(pair: Pair) -> None:
    """Within tolerance: eager products of another number of rows may round differently, and are decoded one by one."""
    hf, model = pair
    state = new_state(model)
    codes = random_codes(CONFIG, 100, batch=3)
    heads, ages = [], (3, 90, 40)
    for slot, age in enumerate(ages):
        heads.append(model(codes[slot : slot + 1, :, :age], state, torch.tensor([slot]), first=True))
    tails = torch.stack([codes[slot, :, age : age + 10] for slot, age in enumerate(ages)])
    padded = torch.cat([tails, random_codes(CONFIG, 10)])
    wav = model(padded, state, torch.tensor([0, 1, 2, state.trash_slot]), first=False)
    for slot, age in enumerate(ages):
        actual = torch.cat([heads[slot], wav[slot : slot + 1]], dim=-1)
        assert worst(actual, hf(codes[slot : slot + 1, :, : age + 10])[:, 0]) < TOLERANCE


def test_a_stream_is_bitwise_the_same_whatever_the_other_slots_do(pair: Pair) -> None:
    _, model = pair
    codes = random_codes(CONFIG, 20)
    alone = decode(model, new_state(model), codes, even(20, 4), [0])
    state, pieces = new_state(model), []
    for index, chunk in enumerate(torch.split(codes, 4, dim=-1)):
        model(random_codes(CONFIG, 7, seed=index), state, torch.tensor([3]), first=index == 0)
        pieces.append(model(chunk, state, torch.tensor([2]), first=index == 0))
    assert torch.equal(torch.cat(pieces, dim=-1), alone)


def test_a_snapshot_continues_bitwise(pair: Pair) -> None:
    _, model = pair
    codes = random_codes(CONFIG, 16)
    state = new_state(model)
    model(codes[..., :9], state, torch.tensor([0]), first=True)
    saved = state.snapshot(0)
    expected = model(codes[..., 9:], state, torch.tensor([0]), first=False)
    state.restore(3, saved)
    assert torch.equal(model(codes[..., 9:], state, torch.tensor([3]), first=False), expected)


def test_sample_counts_follow_the_published_rates() -> None:
    with torch.device("meta"):
        model = Code2Wav(Code2WavConfig())
    assert model.num_samples(1, first=True) == 1365
    assert model.num_samples(10, first=True) == 1920 * 10 - 555
    assert model.num_samples(10, first=False) == 1920 * 10 == 10 * model.config.samples_per_frame


def test_configs_without_streams_are_refused() -> None:
    with pytest.raises(CheckpointError, match="no samples"):
        Code2Wav(msgspec.structs.replace(CONFIG, upsampling_ratios=()))
    with pytest.raises(CheckpointError, match="halved 4 times"):
        Code2Wav(msgspec.structs.replace(CONFIG, decoder_dim=24))


def test_streaming_without_slots_is_an_error(pair: Pair) -> None:
    _, model = pair
    with pytest.raises(ValueError, match="slot"):
        model(random_codes(CONFIG, 1), new_state(model))
