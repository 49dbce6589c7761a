"""Small random images, clips and videos as the media workers would leave them, prompts that hold them, and what
Transformers takes for the same."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.connectors import segments
from triptych.connectors.wire import FeatureRef, MediaItem
from triptych.media.contract import MediaFeatures
from triptych.models.qwen3_omni.config import OmniConfig
from triptych.models.qwen3_omni.media_layout import expand
from triptych.models.qwen3_omni.patches import patchify
from triptych.models.qwen3_omni.preprocessor_config import PreprocessorConfig
from triptych.pipeline.prepare import media_items

TOKEN = f"{os.getpid()}xbench"
_writer = segments.SegmentWriter(TOKEN, segments.MEDIA)
atexit.register(segments.sweep, TOKEN)


@dataclass(frozen=True, eq=False)
class Medium:
    """One part of a message, decoded: pixels uint8 [frames, height, width, 3], or log mel float32 [bands, frames]."""

    kind: Literal["image", "audio", "video"]
    array: NDArray[Any]
    second_per_grid: float = 0.0
    sound: Medium | None = None

    @property
    def grid(self) -> tuple[int, int, int]:
        if self.kind == "audio":
            return (0, 0, 0)
        frames, height, width, _ = self.array.shape
        return (-(-frames // 2), height // 16, width // 16)

    def features(self) -> MediaFeatures:
        """Its features, in a segment that lasts as long as this process."""
        content = self.array.tobytes() + str((self.kind, self.array.shape, self.second_per_grid)).encode()
        return MediaFeatures(
            kind=self.kind,
            digest=blake2b(content, digest_size=16).digest(),
            features=FeatureRef(
                segment=_writer.write([(0, np.ascontiguousarray(self.array).data.cast("B"))]),
                dtype=str(self.array.dtype),
                shape=self.array.shape,
            ),
            grid=self.grid,
            second_per_grid=self.second_per_grid,
            num_mel_frames=self.array.shape[1] if self.kind == "audio" else 0,
            sound=self.sound.features() if self.sound is not None else None,
        )


def picture(seed: int, height: int = 64, width: int = 96) -> Medium:
    return Medium("image", np.random.default_rng(seed).integers(0, 256, (1, height, width, 3), dtype=np.uint8))


def clip(seed: int, frames: int = 130) -> Medium:
    mel = np.random.default_rng(seed).normal(0.0, 0.5, (128, frames))
    return Medium("audio", mel.astype(np.float32))


def video(seed: int, frames: int = 8, height: int = 64, width: int = 64, sound: Medium | None = None) -> Medium:
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    return Medium("video", pixels, second_per_grid=0.5, sound=sound)


Part = int | Medium


@dataclass(frozen=True)
class MediaPrompt:
    token_ids: list[int]
    items: tuple[MediaItem, ...]
    media: tuple[Medium, ...]


def media_prompt(config: OmniConfig, newline: list[int], *turns: tuple[int, Sequence[Part]]) -> MediaPrompt:
    """A chat of (role id, parts) and the assistant's header. A number is a token of text."""
    marks = {
        "image": (config.media.vision_start_token_id, config.image_token_id, config.media.vision_end_token_id),
        "video": (config.media.vision_start_token_id, config.video_token_id, config.media.vision_end_token_id),
        "audio": (config.media.audio_start_token_id, config.audio_token_id, config.media.audio_end_token_id),
    }
    template: list[int] = []
    media: list[Medium] = []
    for role, parts in turns:
        template += [config.im_start_token_id, role, *newline]
        for part in parts:
            if isinstance(part, Medium):
                template += marks[part.kind]
                media.append(part)
            else:
                template.append(part)
        template += [config.im_end_token_id, *newline]
    template += [config.im_start_token_id, config.assistant_token_id, *newline]
    features = [medium.features() for medium in media]
    ids, spans = expand(template, features, config)
    return MediaPrompt(list(ids), media_items(features, spans), tuple(media))


def hf_inputs(prompt: MediaPrompt, preprocessor: PreprocessorConfig) -> dict[str, Any]:
    """What `generate` of Transformers takes for the prompt. Either all of its videos have sound or none has."""
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([prompt.token_ids]),
        "attention_mask": torch.ones(1, len(prompt.token_ids), dtype=torch.long),
    }

    def patches(media: list[Medium]) -> torch.Tensor:
        return torch.cat([patchify(torch.from_numpy(medium.array), preprocessor, torch.float32) for medium in media])

    if images := [medium for medium in prompt.media if medium.kind == "image"]:
        inputs["pixel_values"] = patches(images)
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in images])
    if videos := [medium for medium in prompt.media if medium.kind == "video"]:
        inputs["pixel_values_videos"] = patches(videos)
        inputs["video_grid_thw"] = torch.tensor([film.grid for film in videos])
        inputs["video_second_per_grid"] = torch.tensor([film.second_per_grid for film in videos])
        inputs["use_audio_in_video"] = any(film.sound is not None for film in videos)
    sounds = [medium.sound or medium for medium in prompt.media if medium.kind == "audio" or medium.sound is not None]
    if sounds:
        longest = max(sound.array.shape[1] for sound in sounds)
        padded = np.zeros((len(sounds), sounds[0].array.shape[0], longest), dtype=np.float32)
        mask = np.zeros((len(sounds), longest), dtype=np.int64)
        for index, sound in enumerate(sounds):
            padded[index, :, : sound.array.shape[1]] = sound.array
            mask[index, : sound.array.shape[1]] = 1
        inputs["input_features"], inputs["feature_attention_mask"] = torch.from_numpy(padded), torch.from_numpy(mask)
    return inputs
