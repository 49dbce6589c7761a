"""A minute of speech, streamed in pieces of every cadence, is the minute that Transformers decodes at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.models.qwen3_omni.code2wav import Code2Wav
from triptych.models.qwen3_omni.config import load_config
from triptych.models.weights import load_weights
from triptych.streaming.state import StreamState

FRAMES = 750  # 60 s at 12.5 frames a second


def fixed(size: int) -> Iterator[int]:
    while True:
        yield size


def mixed() -> Iterator[int]:
    rng = random.Random(0)
    while True:
        yield rng.choice((1, 3, 4, 25))


@pytest.fixture(scope="module")
def codes(nano: Path) -> torch.Tensor:
    config = load_config(nano).code2wav
    assert config is not None
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.codebook_size, (1, config.num_quantizers, FRAMES), generator=generator)


@pytest.fixture(scope="module")
def whole(hf_nano: Any, codes: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        wave: torch.Tensor = hf_nano.code2wav(codes)[0, 0]
    assert wave.square().mean().sqrt() > 0.01, "a silent reference would prove nothing"
    return wave


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "compiled"])
def vocoder(nano: Path, request: pytest.FixtureRequest) -> Code2Wav:
    config = load_config(nano).code2wav
    assert config is not None
    with torch.device("meta"):
        model = Code2Wav(config)
    load_weights(model, model.placements, nano, prefixes=model.prefixes, dtype=torch.float32)
    model.prepare(eager=request.param)
    return model


@pytest.mark.parametrize("sizes", [1, 3, 4, 25, "mixed"])
def test_streamed_minute_equals_one_shot(
    vocoder: Code2Wav, whole: torch.Tensor, codes: torch.Tensor, sizes: int | str
) -> None:
    state = StreamState(vocoder, 2, device="cpu", dtype=torch.float32)
    slots = torch.tensor([1])
    pieces, start = [], 0
    for size in mixed() if isinstance(sizes, str) else fixed(sizes):
        if start >= FRAMES:
            break
        with torch.inference_mode():
            pieces.append(vocoder(codes[..., start : start + size], state, slots, first=start == 0)[0])
        start += size
    streamed = torch.cat(pieces)
    assert streamed.shape == whole.shape == (1920 * FRAMES - 555,)
    assert (streamed - whole).abs().max() < 1e-4
