"""Every sentence the Talker learns from, in both voices, as codec frames: spoken, encoded, and the audio dropped."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from training.codec import Codec
from training.domain import Split, sentences
from training.evaluate_codec import load_codec
from training.teacher import VOICES, speak

SENTENCES: dict[Split, int] = {"train": 12_000, "held_out": 300}
_SHARD = 200

Frames = NDArray[np.int16]


class CodeBank:
    """Frames [T, quantizers] by (sentence, teacher's voice)."""

    def __init__(self, folder: Path) -> None:
        self._frames: dict[tuple[str, str], Frames] = {}
        for path in sorted(folder.glob("[0-9][0-9][0-9][0-9].npz")):
            with np.load(path) as shard:
                codes, ends, names = shard["codes"], shard["ends"], json.loads(str(shard["names"]))
            for name, part in zip(names, np.split(codes, ends[:-1]), strict=True):
                self._frames[name[0], name[1]] = part
        self.sentences = sorted({sentence for sentence, _ in self._frames})

    def frames(self, sentence: str, voice: str) -> Frames:
        return self._frames[sentence, voice]

    def __contains__(self, sentence: str) -> bool:
        return all((sentence, voice) in self._frames for voice in VOICES)


def build_bank(work: Path, split: Split, count: int | None = None) -> CodeBank:
    """The bank of a split under `work`, made shard by shard: an interrupted run goes on at the first one missing.

    It belongs to one trained codec, and is made again when the codec has been trained further.
    """
    codec, step = load_codec(work)
    folder = work / f"codes_{split}_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    texts = sentences(count or SENTENCES[split], split)
    for start in range(0, len(texts), _SHARD):
        path = folder / f"{start // _SHARD:04d}.npz"
        if not path.exists():
            _write_shard(path, codec, texts[start : start + _SHARD])
    return CodeBank(folder)


def _write_shard(path: Path, codec: Codec, texts: Sequence[str]) -> None:
    names, parts = [], []
    for text in texts:
        for voice in VOICES:
            names.append([text, voice])
            parts.append(codec.encode(torch.from_numpy(speak(text, voice))).numpy().astype(np.int16))
    ends = np.cumsum([len(part) for part in parts])
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, codes=np.concatenate(parts), ends=ends, names=np.array(json.dumps(names)))
    os.replace(partial, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for split in SENTENCES:
        bank = build_bank(arguments.work, split)
        print(f"{split}: {len(bank.sentences)} sentences in {len(VOICES)} voices", flush=True)


if __name__ == "__main__":
    main()
