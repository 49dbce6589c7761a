"""Spectrograms for the codec: log-mel features of its encoder, and the losses that compare waveforms."""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.teacher import SAMPLE_RATE

MELS = 80
HOP = 240  # 100 Hz
_MEL_FFT = 1024
_TOP_HZ = 8000.0  # the teacher's own band
_RESOLUTIONS = ((512, 128), (1024, 256), (2048, 512))
_FLOOR = 1e-4


@functools.cache
def _window(size: int) -> Tensor:
    return torch.hann_window(size)


@functools.cache
def mel_filters(fft: int = _MEL_FFT, mels: int = MELS) -> Tensor:
    """Triangular filters of unit sum on the mel scale (2595 log10(1 + f / 700)): [mels, fft / 2 + 1]."""
    frequencies = np.linspace(0, SAMPLE_RATE / 2, fft // 2 + 1)
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + _TOP_HZ / 700), mels + 2) / 2595) - 1)
    rising = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    filters = np.maximum(0, np.minimum(rising, falling))
    return torch.from_numpy(filters / np.maximum(filters.sum(1, keepdims=True), 1e-8)).float()


def magnitude(waveform: Tensor, fft: int, hop: int) -> Tensor:
    """Magnitude spectrogram of [B, samples]: [B, fft / 2 + 1, samples / hop + 1]. Smooth at zero."""
    spectrum = torch.stft(waveform, fft, hop, fft, _window(fft), center=True, return_complex=True)
    return (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()


def log_mel(waveform: Tensor) -> Tensor:
    """The encoder's features of [B, samples], samples a multiple of 240: [B, 80, samples / 240], about unit range."""
    mel = mel_filters() @ magnitude(waveform, _MEL_FFT, HOP)[..., :-1]
    return (mel.clamp(min=_FLOOR).log() + 5) / 2.5


def spectral_loss(output: Tensor, target: Tensor) -> Tensor:
    """Distance of two waveforms [B, samples]: log magnitudes and spectral convergence at three resolutions, log-mel.

    The multi-resolution STFT loss of Yamamoto et al., "Parallel WaveGAN" (2020).
    """
    loss = output.new_zeros(())
    for fft, hop in _RESOLUTIONS:
        a, b = magnitude(output, fft, hop), magnitude(target, fft, hop)
        loss = loss + 0.5 * F.l1_loss(a.clamp(min=1e-3).log(), b.clamp(min=1e-3).log())
        loss = loss + 0.5 * torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp(min=1e-3)
        if fft == _MEL_FFT:
            mel_a, mel_b = (mel_filters() @ x for x in (a, b))
            loss = loss + 2 * F.l1_loss(mel_a.clamp(min=_FLOOR).log(), mel_b.clamp(min=_FLOOR).log())
    return loss
