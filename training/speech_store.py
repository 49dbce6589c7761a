"""A speech corpus on disk: int16 samples of all utterances in one memory-mapped file, and an index beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training.teacher import Speech, Waveform


@dataclass(frozen=True, slots=True)
class Utterance:
    sentence: str
    voice: str
    start: int
    samples: int
    phones: list[tuple[str, float]] = field(default_factory=list)  # each with the second at which it ends


class SpeechStore:
    """Utterances of a corpus folder, read on demand."""

    def __init__(self, folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        self.utterances = [Utterance(**entry) for entry in index]
        self._samples: NDArray[np.int16] = np.load(folder / "samples.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.utterances)

    def waveform(self, index: int, start: int = 0, samples: int | None = None) -> Waveform:
        """Float32 samples of one utterance, or of a part of it."""
        utterance = self.utterances[index]
        end = utterance.samples if samples is None else min(utterance.samples, start + samples)
        part = self._samples[utterance.start + start : utterance.start + end]
        return part.astype(np.float32) / 32768


@dataclass(frozen=True, slots=True)
class Recording:
    """One utterance of a corpus."""

    store: SpeechStore
    index: int

    @property
    def utterance(self) -> Utterance:
        return self.store.utterances[self.index]

    def waveform(self, start: int, samples: int) -> Waveform:
        """Float32 samples of a part of it."""
        return self.store.waveform(self.index, start, samples)


def build_store(
    folder: Path, sentences: Sequence[tuple[str, str]], speak: Callable[[str, str], Speech], threads: int = 2
) -> SpeechStore:
    """Speak (sentence, voice) pairs into `folder`. A finished corpus is opened, an unfinished one made again."""
    if (folder / "index.json").exists():
        return SpeechStore(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[NDArray[np.int16]] = []
    index: list[dict[str, object]] = []
    total = 0
    with ThreadPoolExecutor(threads) as pool:
        for (sentence, voice), speech in zip(sentences, pool.map(lambda pair: speak(*pair), sentences), strict=True):
            parts.append(np.round(speech.samples * 32767).astype(np.int16))
            length = len(speech.samples)
            index.append(
                {"sentence": sentence, "voice": voice, "start": total, "samples": length, "phones": speech.phones}
            )
            total += length
    np.save(folder / "samples.npy", np.concatenate(parts))
    partial = folder / "index.partial"
    partial.write_text(json.dumps(index), encoding="utf-8")
    os.replace(partial, folder / "index.json")  # the index comes last: a corpus with one is whole
    return SpeechStore(folder)
