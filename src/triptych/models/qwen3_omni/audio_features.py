"""A clip's log mel spectrogram, as `WhisperFeatureExtractor` makes it of that clip alone.

With torch, which the first clip imports, and in float32, as there: another Fourier transform would round differently,
and in the gaps between harmonics that shows after the logarithm.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from triptych.errors import RequestError
from triptych.models.qwen3_omni.preprocessor_config import PreprocessorConfig

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

BLOCK = 2048  # frames computed at a time, which bounds the memory beside waveform and result to about 30 MB
MAX_FREQUENCY = 8000.0
FLOOR = 1e-10
DYNAMIC_RANGE = 8.0  # decades below the clip's loudest band
LOUDEST = 1e15  # full scale is 1; the power of any band is still finite then
STEP = math.log(6.4) / 27  # of Slaney's scale above 1 kHz, which is 15 mels


def log_mel(waveform: NDArray[np.float32], config: PreprocessorConfig) -> NDArray[np.float32]:
    """float32 [samples] at `config.sampling_rate`, full scale 1 -> float32 [bands, samples // hop_length].

    Frames are centred on multiples of the hop, the clip mirrored at both ends. Raises RequestError for a clip shorter
    than the mirror needs, or whose samples are not finite or so large that their power is not.
    """
    if waveform.dtype != np.float32 or waveform.ndim != 1:
        raise ValueError(f"waveform must be float32 [samples], not {waveform.dtype} {list(waveform.shape)}")
    least = max(config.n_fft // 2 + 1, config.hop_length)
    if len(waveform) < least:
        raise RequestError(
            f"the clip has {len(waveform)} samples at {config.sampling_rate} Hz; it must have at least {least}"
        )
    loudest = float(max(waveform.max(), -waveform.min()))
    if not loudest <= LOUDEST:  # NaN, too
        raise RequestError(
            f"the loudest sample of the clip is {loudest:g}: it may be at most {LOUDEST:g}, and full scale is 1; send "
            "samples in [-1, 1]"
        )
    frames = len(waveform) // config.hop_length
    spectrogram = np.empty((config.num_mel_bins, frames), np.float32)
    for start in range(0, frames, BLOCK):
        stop = min(start + BLOCK, frames)
        spectrogram[:, start:stop] = _decades(waveform, start, stop, config)
    peak = spectrogram.max()
    np.maximum(spectrogram, peak - np.float32(DYNAMIC_RANGE), out=spectrogram)
    spectrogram += np.float32(4.0)
    spectrogram /= np.float32(4.0)
    return spectrogram


def _decades(waveform: NDArray[np.float32], start: int, stop: int, config: PreprocessorConfig) -> NDArray[np.float32]:
    """log10 of the power in each band, [bands, stop - start], of the frames from `start` to `stop`."""
    import torch

    hop, length = config.hop_length, config.n_fft
    last = len(waveform) - 1
    index = np.abs(np.arange(start * hop - length // 2, (stop - 1) * hop + length // 2))  # mirrored at the start
    samples = torch.from_numpy(waveform[last - np.abs(last - index)])  # and at the end
    spectrum = torch.fft.rfft(samples.unfold(0, length, hop) * torch.hann_window(length))
    power = spectrum.abs() ** 2
    bands = _mel_filters(length, config.num_mel_bins, config.sampling_rate) @ power.T
    decades: NDArray[np.float32] = bands.clamp(min=FLOOR).log10().numpy()
    return decades


@lru_cache(maxsize=1)
def _mel_filters(n_fft: int, bands: int, sampling_rate: int) -> torch.Tensor:
    """Triangles of equal area on Slaney's scale (linear to 1 kHz, logarithmic above), [bands, n_fft // 2 + 1]."""
    import torch

    bins = np.linspace(0, sampling_rate // 2, n_fft // 2 + 1)
    edges = _hertz(np.linspace(0, _mels(MAX_FREQUENCY), bands + 2))[:, None]
    rise = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    triangles = np.maximum(0, np.minimum(rise, fall)) * (2 / (edges[2:] - edges[:-2]))
    return torch.from_numpy(triangles).float()


def _mels(hertz: float) -> float:
    return 15 + math.log(hertz / 1000) / STEP if hertz >= 1000 else 3 * hertz / 200


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mels >= 15, 1000 * np.exp(STEP * (mels - 15)), 200 * mels / 3)
