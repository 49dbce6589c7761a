"""A small net that tells the teacher's phones apart: what it hears, the codec's decoder is to keep."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.alignment import PHONES, Phones
from training.checkpoints import resume, save_step, seed_step
from training.log import TrainingLog
from training.schedule import cosine, set_rate, step_generator
from training.spectra import HOP, MELS, log_mel
from training.speech import speech_store
from training.speech_store import SpeechStore
from training.teacher import FRAME, SAMPLE_RATE

STEPS, BATCH, FRAMES, PEAK_RATE, SEED = 1500, 16, 20, 2e-3, 9
_WIDTH, _DILATIONS = 128, (1, 2, 4)
_NOISE = 0.15  # of a feature's spread, added while it learns


class PhoneEar(nn.Module):
    """Log-mel features [B, 80, T] at 100 Hz -> phone logits [B, phones, T], and the states of each layer on the way."""

    def __init__(self) -> None:
        super().__init__()
        widths = [MELS, *[_WIDTH] * len(_DILATIONS)]
        self.layers = nn.ModuleList(
            nn.Conv1d(narrow, wide, 5, padding=2 * dilation, dilation=dilation)
            for narrow, wide, dilation in zip(widths, widths[1:], _DILATIONS, strict=False)
        )
        self.head = nn.Conv1d(_WIDTH, len(PHONES), 1)

    def forward(self, mel: Tensor) -> tuple[Tensor, list[Tensor]]:
        states = []
        for layer in self.layers:
            mel = F.gelu(layer(mel))
            states.append(mel)
        return self.head(mel), states


def clarity_loss(ear: PhoneEar, output: Tensor, target: Tensor) -> Tensor:
    """How differently the ear hears two waveforms [B, samples]: its states, and the phones that it makes of them.

    Feature matching as of Larsen et al., "Autoencoding beyond pixels" (2016), with a net that stays as it is.
    """
    whole = output.shape[1] // HOP * HOP
    with torch.no_grad():
        wanted, true = ear(log_mel(target[:, :whole]))
    heard, states = ear(log_mel(output[:, :whole]))
    loss = F.kl_div(heard.log_softmax(1), wanted.log_softmax(1), reduction="none", log_target=True).sum(1).mean()
    for state, goal in zip(states, true, strict=True):
        loss = loss + F.l1_loss(state, goal) / goal.abs().mean()
    return loss


def labels(phones: Phones, start: float, count: int) -> list[int]:
    """The phone that is said in each of `count` hops of 10 ms from second `start` on, a pause where none is."""
    found, current = [], 0
    for hop in range(count):
        middle = start + (hop + 0.5) * HOP / SAMPLE_RATE
        while current < len(phones) and phones[current][1] < middle:
            current += 1
        found.append(PHONES.index(phones[current][0]) if current < len(phones) and middle >= 0 else 0)
    return found


def _batch(store: SpeechStore, chances: np.ndarray, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Mel features [B, 80, T] and phones [B, T] of random crops."""
    mels, said = [], []
    for index in rng.choice(len(store), BATCH, p=chances):
        utterance = store.utterances[int(index)]
        first = int(rng.integers(0, max(1, utterance.samples // FRAME - FRAMES + 1)))
        crop = store.waveform(int(index), first * FRAME, FRAMES * FRAME)
        crop = np.pad(crop, (0, FRAMES * FRAME - len(crop)))
        mels.append(log_mel(torch.from_numpy(crop)[None])[0])
        said.append(labels(utterance.phones, first * FRAME / SAMPLE_RATE, FRAMES * FRAME // HOP))
    return torch.stack(mels), torch.tensor(said)


def train_ear(work: Path, steps: int = STEPS) -> PhoneEar:
    """The trained ear under `work`, frozen. Goes on from the last saved step."""
    folder = work / "phone_ear"
    store = speech_store(work)
    lengths = np.array([utterance.samples for utterance in store.utterances], dtype=np.float64)
    torch.manual_seed(SEED)
    ear = PhoneEar()
    optimizer = torch.optim.AdamW(ear.parameters(), lr=PEAK_RATE, weight_decay=1e-2)
    step = resume(folder / "state.pt", ear, optimizer)
    log = TrainingLog(folder / "log.jsonl", every=20)
    while step < steps:
        started = time.monotonic()
        seed_step(SEED, step)
        set_rate(optimizer, cosine(step, steps, PEAK_RATE))
        mel, said = _batch(store, lengths / lengths.sum(), step_generator(SEED, step))
        logits, _ = ear(mel + _NOISE * torch.randn_like(mel))
        loss = F.cross_entropy(logits, said)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        right = (logits.argmax(1) == said).float().mean()
        log.add(step, loss=loss.item(), right=right.item(), seconds=time.monotonic() - started)
        if step % 100 == 0 or step == steps:
            save_step(folder / "state.pt", step, ear, optimizer)
    return ear.eval().requires_grad_(False)
