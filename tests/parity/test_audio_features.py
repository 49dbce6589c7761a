"""The log mel spectrogram is that of Transformers' feature extractor for the clip alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from triptych.errors import RequestError
from triptych.models.qwen3_omni import audio_features
from triptych.models.qwen3_omni.audio_features import LOUDEST, log_mel
from triptych.models.qwen3_omni.preprocessor_config import PreprocessorConfig, load_preprocessor

Array = np.ndarray[Any, Any]
RATE = 16_000


@pytest.fixture(scope="module")
def config(nano: Path) -> PreprocessorConfig:
    return load_preprocessor(nano)


@pytest.fixture(scope="module")
def extract(nano: Path) -> Callable[[Array], Array]:
    extractor = WhisperFeatureExtractor.from_pretrained(nano)

    def features(waveform: Array) -> Array:
        made = extractor(
            [waveform],
            sampling_rate=RATE,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="np",
        )
        kept: Array = made["input_features"][0][:, made["attention_mask"][0] == 1]
        return kept

    return features


def noise(samples: int) -> Array:
    return np.random.RandomState(samples % 1000).randn(samples).astype(np.float32) * np.float32(0.1)


def voiced(samples: int) -> Array:
    """Harmonics of a gliding pitch that swell and fade, and a breath of noise."""
    time = np.arange(samples) / RATE
    pitch = 120 * time + 8 * np.sin(2 * np.pi * 0.7 * time)
    tone = sum(np.sin(2 * np.pi * k * pitch) / k for k in range(1, 25))
    return (tone * np.sin(2 * np.pi * 1.5 * time) ** 2 * 0.2).astype(np.float32) + noise(samples) * np.float32(1e-3)


SIGNALS: dict[str, Callable[[int], Array]] = {
    "noise": noise,
    "voiced": voiced,
    "silence": lambda n: np.zeros(n, np.float32),
    "dc": lambda n: np.full(n, 0.5, np.float32),
    "clipping": lambda n: np.clip(5 * np.sin(2 * np.pi * 300 * np.arange(n) / RATE), -1, 1).astype(np.float32),
    "faint": lambda n: np.round(noise(n) * 30).astype(np.float32) / np.float32(32768),
    "sweep": lambda n: np.sin(2 * np.pi * (50 + 0.04 * np.arange(n)) * np.arange(n) / RATE).astype(np.float32),
    "impulse": lambda n: (np.arange(n) == n // 3).astype(np.float32),
    "loud end": lambda n: noise(n) * (np.arange(n) > 0.9 * n).astype(np.float32) + noise(n) * np.float32(1e-4),
}
LENGTHS = [800, 801, 959, 960, 961, 1600, 12_345, RATE, 3 * RATE - 1, 30 * RATE, 70 * RATE + 77]


@pytest.mark.parametrize("samples", LENGTHS)
@pytest.mark.parametrize("signal", ["noise", "voiced"])
def test_any_length_gives_the_extractors_features(
    samples: int, signal: str, config: PreprocessorConfig, extract: Callable[[Array], Array]
) -> None:
    waveform = SIGNALS[signal](samples)
    made = log_mel(waveform, config)
    assert made.dtype == np.float32 and made.shape == (128, samples // 160)
    np.testing.assert_allclose(made, extract(waveform), atol=1e-6, rtol=0)


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("samples", [800, 4 * RATE + 5])
def test_any_signal_gives_the_extractors_features(
    signal: str, samples: int, config: PreprocessorConfig, extract: Callable[[Array], Array]
) -> None:
    waveform = SIGNALS[signal](samples)
    np.testing.assert_allclose(log_mel(waveform, config), extract(waveform), atol=1e-6, rtol=0)


@pytest.mark.parametrize("samples", [201, 202, 319, 320, 400, 401])
def test_the_shortest_clips_that_can_be_mirrored(
    samples: int, config: PreprocessorConfig, extract: Callable[[Array], Array]
) -> None:
    waveform = noise(samples)
    np.testing.assert_allclose(log_mel(waveform, config), extract(waveform), atol=1e-6, rtol=0)


def test_a_clip_too_short_to_be_mirrored_is_refused_here_as_there(
    config: PreprocessorConfig, extract: Callable[[Array], Array]
) -> None:
    with pytest.raises(RuntimeError, match="Padding"):
        extract(noise(200))
    for samples in (0, 1, 200):
        with pytest.raises(RequestError, match=f"{samples} samples at 16000 Hz; it must have at least 201"):
            log_mel(noise(samples), config)


@pytest.mark.parametrize("block", [1, 2, 7, 100, 399, 400])
def test_blocks_do_not_show(block: int, config: PreprocessorConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    waveform = SIGNALS["loud end"](400 * 160 + 50)  # the loudest band, which sets the floor, is in the last block
    whole = log_mel(waveform, config)
    monkeypatch.setattr(audio_features, "BLOCK", block)
    np.testing.assert_allclose(log_mel(waveform, config), whole, atol=3e-7, rtol=0)


MEMORY = """
import resource, sys
import numpy as np
from triptych.models.qwen3_omni.audio_features import LOUDEST, log_mel
from triptych.models.qwen3_omni.preprocessor_config import load_preprocessor

config = load_preprocessor(sys.argv[1])
waveform = np.ones(600 * 16_000, np.float32)
log_mel(waveform[: 60 * 16_000], config)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = log_mel(waveform, config)
print(made.shape, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 - made.nbytes)
"""


def test_ten_minutes_need_no_more_memory_than_one_and_their_result(nano: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", MEMORY, nano], capture_output=True, text=True, check=True, timeout=60)
    shape, extra = ran.stdout.rsplit(maxsplit=1)
    assert shape == "(128, 60000)"
    assert int(extra) < 16 * 1024**2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38])
def test_samples_without_a_finite_power_are_refused(value: float, config: PreprocessorConfig) -> None:
    waveform = noise(RATE)
    waveform[9000] = value
    with pytest.raises(RequestError, match=r"it may be at most 1e\+15, and full scale is 1"):
        log_mel(waveform, config)


def test_samples_as_loud_as_may_be_have_a_finite_power(config: PreprocessorConfig) -> None:
    rng = np.random.default_rng(3)
    for waveform in (np.ones(RATE), np.sign(rng.standard_normal(RATE)), np.cos(np.arange(RATE) * np.pi / 16)):
        assert np.isfinite(log_mel((waveform * LOUDEST).astype(np.float32), config)).all()


def test_only_one_channel_of_float32_is_taken(config: PreprocessorConfig) -> None:
    for wrong in (np.zeros(RATE), np.zeros((RATE, 2), np.float32)):
        with pytest.raises(ValueError, match="float32"):
            log_mel(wrong, config)


def test_sizes_and_options_are_there_without_torch() -> None:
    names = ("audio_features", "image_features", "video_features", "media_options", "preprocessor_config")
    code = "import sys\n" + "".join(f"import triptych.models.qwen3_omni.{name}\n" for name in names)
    code += "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
