"""The shapes of a checkpoint's tensors by its `config.json` alone, from the stages' own modules without memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from triptych.models.placement import Placement
from triptych.models.qwen3_omni.code2wav import Code2Wav
from triptych.models.qwen3_omni.config import load_config
from triptych.models.qwen3_omni.encoders import PREFIXES, Encoders
from triptych.models.qwen3_omni.talker import Talker
from triptych.models.qwen3_omni.thinker import Thinker


def meta_shapes(model_dir: str | Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the stages would load, experts stacked. Raises CheckpointError."""
    return {place.source: place.shape for place in _placements(Path(model_dir))}


def _placements(folder: Path) -> Iterator[Placement]:
    config = load_config(folder)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    media = zip(PREFIXES, (config.media.has_audio, config.media.has_vision), strict=True)
    with torch.device("meta"):
        yield from Thinker(config).placements("fused")
        yield from Encoders(raw, [prefix for prefix, there in media if there]).placements("fused")
        if config.talker is not None:
            yield from Talker(config).placements("fused")
        if config.code2wav is not None:
            yield from Code2Wav(config.code2wav).placements("fused")


if __name__ == "__main__":
    json.dump(meta_shapes(sys.argv[1]), sys.stdout)
