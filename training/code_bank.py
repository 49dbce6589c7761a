"""The speech corpus as codec frames, which the Talker learns from: encoded once for a trained codec."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from training.alignment import words_of_frames
from training.codec import Codec
from training.domain import Split
from training.evaluate_codec import load_codec
from training.speech import by_heart_store, common_store, lists_store, speech_store, unseen_store
from training.speech_store import Recording, SpeechStore

Frames = NDArray[np.int16]


class CodeBank:
    """Frames [T, quantizers] of every utterance of some corpora, by sentence and voice."""

    def __init__(self, spoken: Iterable[tuple[Recording, Frames]]) -> None:
        self._frames: dict[str, dict[str, Frames]] = {}
        self._recordings: dict[tuple[str, str], Recording] = {}
        for recording, part in spoken:
            utterance = recording.utterance
            self._frames.setdefault(utterance.sentence, {})[utterance.voice] = part
            self._recordings[utterance.sentence, utterance.voice] = recording
        self.sentences = sorted(self._frames)

    def voices(self, sentence: str) -> list[str]:
        """The teacher's voices that have spoken it."""
        return list(self._frames[sentence])

    def frames(self, sentence: str, voice: str) -> Frames:
        return self._frames[sentence][voice]

    def recording(self, sentence: str, voice: str) -> Recording:
        return self._recordings[sentence, voice]

    def said(self, sentence: str, voice: str) -> tuple[list[int | None], list[str]]:
        """Per frame the index of the word that is said, None in pauses, and the phone."""
        phones = self.recording(sentence, voice).utterance.phones
        return words_of_frames(sentence, voice, phones, len(self.frames(sentence, voice)))

    def __contains__(self, sentence: str) -> bool:
        return sentence in self._frames


def build_bank(work: Path, split: Split) -> CodeBank:
    """What the Talker learns from, or is measured by, under `work`. Made on first use, and again when the encoder was
    trained further."""
    stores = {split: speech_store(work, split)}
    if split == "train":
        stores |= {"by_heart": by_heart_store(work), "common": common_store(work), "lists": lists_store(work)}
    return _bank(work, stores)


def build_own_bank(work: Path) -> CodeBank:
    """What the decoder hears the Talker say itself: sentences that it was not taught, and those that all know."""
    return _bank(work, {"unseen": unseen_store(work), "by_heart": by_heart_store(work)})


def _bank(work: Path, stores: dict[str, SpeechStore]) -> CodeBank:
    codec, _ = load_codec(work)
    return CodeBank(chain.from_iterable(_encoded(work, name, store, codec) for name, store in stores.items()))


def _encoded(work: Path, name: str, store: SpeechStore, codec: Codec) -> Iterable[tuple[Recording, Frames]]:
    path = work / f"codes_{name}_{codec.digest()}.npz"
    if not path.exists():
        parts = [codec.encode(torch.from_numpy(store.waveform(index))).numpy() for index in range(len(store))]
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, codes=np.concatenate(parts).astype(np.int16), ends=np.cumsum([len(part) for part in parts]))
        os.replace(partial, path)
    with np.load(path) as saved:
        parts = np.split(saved["codes"], saved["ends"][:-1])
    return [(Recording(store, index), part) for index, part in enumerate(parts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    splits: tuple[Split, ...] = ("train", "held_out")
    for split in splits:
        print(f"{split}: {len(build_bank(arguments.work, split).sentences)} sentences", flush=True)


if __name__ == "__main__":
    main()
