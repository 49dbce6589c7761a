"""Speech as the audio encoder gets it: a clip as somebody would record it, and its features."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import soxr
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor

from training.teacher import SAMPLE_RATE, Waveform

RATE = 16_000
TELEPHONE, _TELEPHONE_RATE = 0.15, 8_000  # clips that were sampled at half the rate before
LONG_PAUSE, SOFTEST, NOISE = 3.0, 0.05, 0.015  # seconds; of full loudness; standard deviation of the loudest noise


def recorded(speech: Waveform, rng: random.Random) -> Waveform:
    """Speech at 24 kHz as a clip at 16 kHz: a pause on both sides, some loudness and noise, at times a telephone."""
    sound = soxr.resample(speech, SAMPLE_RATE, RATE)
    if rng.random() < TELEPHONE:
        narrow = soxr.resample(sound, RATE, _TELEPHONE_RATE)
        sound = soxr.resample(narrow, _TELEPHONE_RATE, RATE)
    longest = LONG_PAUSE if rng.random() < 0.2 else 0.25
    quiet = [np.zeros(int(rng.uniform(0, longest) * RATE), dtype=np.float32) for _ in range(2)]
    loudness = 1.4 * math.exp(rng.uniform(math.log(SOFTEST), 0)) if rng.random() < 0.4 else rng.uniform(0.4, 1.4)
    sound = np.concatenate([quiet[0], sound, quiet[1]]) * loudness
    hiss = NOISE * rng.random() ** 2
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(len(sound)) * hiss * min(1.0, loudness)
    clip: Waveform = np.clip(sound + noise, -1, 1).astype(np.float32)
    return clip


@cache
def _extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=128, hop_length=160, n_fft=400, chunk_length=30)


def features(sounds: Sequence[Waveform]) -> tuple[Tensor, Tensor]:
    """Clips at 16 kHz -> mel features [B, 128, T] and which of their frames are sound [B, T]."""
    found = _extractor()(
        list(sounds), sampling_rate=RATE, padding=True, truncation=False, return_attention_mask=True,
        return_tensors="pt",
    )["input_features"]  # fmt: skip
    # Beside a longer clip, the extractor counts a last frame that the clip alone would not have.
    frames = torch.tensor([len(sound) // 160 for sound in sounds])
    return found, (torch.arange(found.shape[-1]) < frames[:, None]).long()


def sound_rows(samples: int) -> int:
    """The encoder's rows for so many samples at 16 kHz: 13 for each second of 100 feature frames, and the rest."""
    frames = samples // 160
    rest = frames % 100
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + frames // 100 * 13
