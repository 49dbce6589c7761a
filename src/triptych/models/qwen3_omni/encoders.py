"""The audio and vision encoders of the Thinker: Transformers' own modules, and the checkpoint tensors that fill them.

The names are those of `Qwen3OmniMoeAudioEncoder` and `Qwen3OmniMoeVisionEncoder`, below `thinker.audio_tower.` and
`thinker.visual.`. A Thinker without encoders never imports transformers' models.

Both cut exactly. Patches attend within their temporal patch, so a video may be encoded a few temporal patches at a
time. Spectrogram frames are convolved in chunks of 2 * n_window and attend within n_window_infer, so a clip may be cut
at multiples of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.models.placement import Layout, Placement
from triptych.models.safetensors_index import tensor_index

PREFIXES = ("thinker.audio_tower.", "thinker.visual.")


class Encoders(nn.Module):
    """Both encoders of a parsed `config.json`, as `audio_tower` and `visual`. Build them anywhere, then load them."""

    prefixes: tuple[str, ...] = PREFIXES

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        from transformers import Qwen3OmniMoeConfig
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
            Qwen3OmniMoeAudioEncoder,
            Qwen3OmniMoeVisionEncoder,
        )

        thinker = Qwen3OmniMoeConfig.from_dict(raw).thinker_config
        audio, vision = thinker.audio_config, thinker.vision_config
        self.audio_tower: Any = Qwen3OmniMoeAudioEncoder._from_config(audio, attn_implementation="sdpa").eval()
        self.visual: Any = Qwen3OmniMoeVisionEncoder._from_config(vision, attn_implementation="sdpa").eval()
        self._compute_tables()
        self.chunk_frames: int = 2 * audio.n_window  # what the convolutions see at a time
        self.window_frames: int = (
            audio.n_window_infer // self.chunk_frames * self.chunk_frames
        )  # what attends to each other
        self.num_mel_bins: int = audio.num_mel_bins
        self.patch_size: int = vision.patch_size
        self.temporal_patch_size: int = vision.temporal_patch_size
        self.spatial_merge_size: int = vision.spatial_merge_size
        self.hidden_size: int = vision.out_hidden_size
        self.num_deepstack = len(vision.deepstack_visual_indexes)

    def _compute_tables(self) -> None:
        """The tables that no checkpoint holds, in float32 and with values also where the module has none (meta)."""
        with torch.device("cpu"):
            sinusoids = self.audio_tower.positional_embedding
            sinusoids.positional_embedding = sinusoids.compute_default_singular_positional_embedding()
            rotary = self.visual.rotary_pos_emb
            rotary.inv_freq, _ = rotary.compute_axial_rope_parameters(rotary.config)
            rotary.original_inv_freq = rotary.inv_freq.clone()

    def placements(self, layout: Layout) -> Iterator[Placement]:
        """Every tensor of both encoders. Encoders have no experts, so the layout makes no difference."""
        for name, tensor in self.state_dict(keep_vars=True).items():
            yield Placement(f"thinker.{name}", name, tuple(tensor.shape))

    def audio_rows(self, frames: int) -> int:
        """How many rows a clip, or a slice of one, of so many frames gives."""
        whole, rest = divmod(frames, self.chunk_frames)
        return whole * _convolved(self.chunk_frames) + _convolved(rest)

    @torch.inference_mode()
    def encode_vision(
        self, patches: Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Patches [sum of t*h*w, channels * temporal_patch * patch^2] of pictures one after another, each t temporal
        patches of h x w -> rows [sum of t*h*w / merge^2, hidden], and as many for each DeepStack layer."""
        grid = torch.tensor(grids, dtype=torch.long, device=patches.device)
        found = self.visual(patches, grid_thw=grid)
        return found.pooler_output, tuple(found.deepstack_features)

    @torch.inference_mode()
    def encode_audio(self, slices: Sequence[Tensor], *, chunk: int) -> Tensor:
        """Spectrograms [mel bins, frames], each a clip or a slice of one -> their rows [n, hidden] one after another.

        `chunk` is the longest convolution chunk of the clip: min(its frames, chunk_frames). A shorter last chunk is
        padded to it, and the convolutions see the padding, so a slice of a clip gives what the whole clip gives only
        with the clip's own.
        """
        pieces = [piece for mel in slices for piece in torch.split(mel, self.chunk_frames, dim=1)]
        lengths = [_convolved(piece.shape[1]) for piece in pieces]
        width, rows, device = _convolved(chunk), torch.arange(_convolved(chunk)), slices[0].device
        valid = torch.cat([index * width + rows[:length] for index, length in enumerate(lengths)])
        windows = [
            self.audio_rows(window.shape[1]) for mel in slices for window in torch.split(mel, self.window_frames, dim=1)
        ]
        rows_of: Tensor = self.audio_tower(
            padded_feature=torch.stack([F.pad(piece, (0, chunk - piece.shape[1])) for piece in pieces]),
            chunk_lengths=torch.tensor([piece.shape[1] for piece in pieces]),
            valid_indices=valid.to(device),
            cu_seqlens=F.pad(torch.tensor(windows, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)),
        ).last_hidden_state
        return rows_of


def has_encoders(model_dir: str | Path) -> bool:
    """Whether a checkpoint holds any tensor of an encoder."""
    return bool(tensor_index(model_dir, lambda name: name.startswith(PREFIXES)))


def encoder_placements(raw: dict[str, Any]) -> list[Placement]:
    """The encoders' tensors for a parsed `config.json`, without building them."""
    with torch.device("meta"):
        return list(Encoders(raw).placements("per_expert"))


def _convolved(frames: int) -> int:
    """Frames left by three convolutions of stride 2 and padding 1 over a chunk."""
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames
