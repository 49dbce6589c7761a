"""Both encoders of the Thinker, as the checkpoint at hand has them.

Their tensors are below `thinker.audio_tower.` and `thinker.visual.`, under the names of transformers' modules, which
are not used themselves: importing them takes longer than starting a stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from triptych.errors import CheckpointError
from triptych.models.placement import Layout, Placement
from triptych.models.qwen3_omni.audio_encoder import AudioEncoder, AudioEncoderConfig
from triptych.models.qwen3_omni.vision_encoder import Grid, VisionEncoder, VisionEncoderConfig
from triptych.models.safetensors_index import tensor_index

PREFIXES = ("thinker.audio_tower.", "thinker.visual.")


class Encoders(nn.Module):
    """The encoders of a parsed `config.json` whose PREFIXES are named. Build them anywhere, then load them.

    Raises CheckpointError for sizes that do not fit each other, or that are not supported.
    """

    def __init__(self, raw: Mapping[str, Any], prefixes: Collection[str] = PREFIXES) -> None:
        super().__init__()
        self.prefixes = tuple(prefixes)
        thinker = raw["thinker_config"]
        self.hidden_size: int = thinker["text_config"]["hidden_size"]
        self.audio_tower: AudioEncoder | None = None
        self.visual: VisionEncoder | None = None
        key = "audio_config"
        try:
            if PREFIXES[0] in prefixes:
                audio = msgspec.convert(thinker.get(key) or {}, AudioEncoderConfig)
                self._expect_hidden("output_dim", audio.output_dim)
                self.audio_tower = AudioEncoder(audio)
            key = "vision_config"
            if PREFIXES[1] in prefixes:
                vision = msgspec.convert(thinker.get(key) or {}, VisionEncoderConfig)
                self._expect_hidden("out_hidden_size", vision.out_hidden_size)
                self.visual = VisionEncoder(vision)
        except (msgspec.ValidationError, ValueError) as error:
            raise CheckpointError(f"config.json: thinker_config.{key}: {error}") from error
        self.requires_grad_(False)

    def _expect_hidden(self, name: str, size: int) -> None:
        if size != self.hidden_size:
            raise ValueError(f"{name} {size} is not the text decoder's hidden_size {self.hidden_size}")

    @property
    def num_deepstack(self) -> int:
        """Layers of the text decoder that rows of a picture are added behind, beside being its input."""
        return 0 if self.visual is None else len(self.visual.config.deepstack_visual_indexes)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def placements(self, layout: Layout) -> Iterator[Placement]:
        """Every tensor of the encoders. They have no experts, so the layout makes no difference."""
        for name, tensor in self.state_dict(keep_vars=True).items():
            yield Placement(f"thinker.{name}", name, tuple(tensor.shape))

    @torch.inference_mode()
    def encode_vision(self, patches: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Patches of pictures one after another, each t temporal patches of h x w, [sum of t * h * w, channels *
        temporal patch * patch^2] -> rows [sum of t * h * w / merge^2, hidden], and as many for each DeepStack layer."""
        assert self.visual is not None
        rows, deepstack = self.visual(patches, grids)
        return rows, deepstack

    @torch.inference_mode()
    def encode_audio(self, slices: Sequence[Tensor], *, chunk: int) -> Tensor:
        """Spectrograms [mel bins, frames] of clips or slices of clips -> their rows [n, hidden] one after another.

        `chunk`: see `AudioEncoder.forward`.
        """
        assert self.audio_tower is not None
        rows: Tensor = self.audio_tower(slices, chunk)
        return rows


def encoder_prefixes(model_dir: str | Path) -> tuple[str, ...]:
    """Those of PREFIXES that a checkpoint holds tensors of."""
    names = tensor_index(model_dir, lambda name: name.startswith(PREFIXES))
    return tuple(prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in names))


def encoder_placements(raw: Mapping[str, Any]) -> list[Placement]:
    """The encoders' tensors for a parsed `config.json`, without memory for them."""
    with torch.device("meta"):
        return list(Encoders(raw).placements("per_expert"))
