"""How a checkpoint wants pixels and sound prepared, as frozen values, read without transformers or torch.

The files, which of them counts, and the defaults are those of `transformers`' `Qwen3OmniMoeProcessor` and of the
`Qwen2VLImageProcessor`, `Qwen2VLVideoProcessor` and `WhisperFeatureExtractor` inside it. Two things are said here and
not there: videos are always sampled, at FPS frames a second unless the checkpoint or the request says otherwise; and
what those classes would silently skip (no resizing, another resampling filter, dither) is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from triptych.errors import CheckpointError
from triptych.models.qwen3_omni.config import MediaConfig, load_config

FPS = 2.0  # frames a second sampled of a video, as in the family's published examples
BICUBIC = 3  # Pillow's number, which the files use
SAMPLING_RATE = 16_000  # the one that the family's processor calls its feature extractor with

Count = Annotated[int, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Channels = tuple[float, float, float]


class PreprocessorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Images and frames share patches and normalisation; their limits on pixels differ."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    image_mean: Channels
    image_std: Channels
    rescale_factor: float
    image_min_pixels: int
    image_max_pixels: int
    frame_min_pixels: int
    frame_max_pixels: int
    fps: float
    min_frames: int
    max_frames: int
    cap_pixels_per_frame: bool  # whether the frames of one video share `max_video_tokens`
    max_video_tokens: int
    sampling_rate: int
    num_mel_bins: int
    n_fft: int
    hop_length: int

    @property
    def factor(self) -> int:
        """Heights and widths are multiples of this: the side of what becomes one row of a prompt."""
        return self.patch_size * self.merge_size


class _Size(msgspec.Struct, frozen=True):
    shortest_edge: Count
    longest_edge: Count


class _Image(msgspec.Struct, frozen=True, kw_only=True):
    patch_size: Count = 14
    temporal_patch_size: Count = 2
    merge_size: Count = 2
    image_mean: Channels = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[Positive, Positive, Positive] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: Positive = 1 / 255
    size: _Size = _Size(56 * 56, 28 * 28 * 1280)
    min_pixels: Count | None = None
    max_pixels: Count | None = None
    resample: int = BICUBIC
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True


class _Video(_Image, frozen=True, kw_only=True):
    # The whole processor's own limits stand above those of a video processor's file.
    size: _Size = _Size(128 * 32 * 32, 768 * 32 * 32)
    fps: Positive = FPS
    num_frames: Count | None = None
    min_frames: Count = 4
    max_frames: Count = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: Count = 128_000


class _Audio(msgspec.Struct, frozen=True, kw_only=True):
    feature_size: Count = 80
    sampling_rate: Count = SAMPLING_RATE
    n_fft: Count = 400
    hop_length: Count = 160
    dither: float = 0.0


def load_preprocessor(model_dir: str | Path) -> PreprocessorConfig:
    """Read the preprocessor's settings of a checkpoint folder, and hold them to its `config.json`.

    `processor_config.json` comes first where it has the part in question, then `video_preprocessor_config.json` for
    videos, then `preprocessor_config.json`.

    Raises CheckpointError naming the file and the key when one is missing, of the wrong type, or not what the model
    was built for.
    """
    folder = Path(model_dir)
    image, image_from = _part(folder, ("image_processor",), ("preprocessor_config.json",), _Image)
    video, video_from = _part(
        folder, ("video_processor",), ("video_preprocessor_config.json", "preprocessor_config.json"), _Video, "size"
    )
    audio, audio_from = _part(folder, ("feature_extractor", "audio_processor"), ("preprocessor_config.json",), _Audio)
    _check_supported(image, image_from)
    _check_supported(video, video_from)
    for key in ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "rescale_factor"):
        ours, theirs = getattr(image, key), getattr(video, key)
        if ours != theirs:
            raise CheckpointError(f"{video_from}: {key} is {theirs} for videos, but {ours} for images in {image_from}")
    if video.num_frames is not None:
        raise CheckpointError(f"{video_from}: num_frames is not supported as a checkpoint's setting; use fps")
    if video.max_frames < max(video.min_frames, video.temporal_patch_size):
        raise CheckpointError(
            f"{video_from}: max_frames {video.max_frames} is below min_frames {video.min_frames} or "
            f"temporal_patch_size {video.temporal_patch_size}"
        )
    if audio.sampling_rate != SAMPLING_RATE:
        raise CheckpointError(
            f"{audio_from}: sampling_rate {audio.sampling_rate} is not supported; it must be {SAMPLING_RATE}"
        )
    if audio.dither:
        raise CheckpointError(f"{audio_from}: dither {audio.dither} is not supported; it must be 0")
    if audio.n_fft % 2 or audio.hop_length > audio.n_fft:
        raise CheckpointError(f"{audio_from}: n_fft {audio.n_fft} must be even and at least hop_length")
    config = PreprocessorConfig(
        patch_size=image.patch_size,
        temporal_patch_size=image.temporal_patch_size,
        merge_size=image.merge_size,
        image_mean=image.image_mean,
        image_std=image.image_std,
        rescale_factor=image.rescale_factor,
        image_min_pixels=image.min_pixels or image.size.shortest_edge,
        image_max_pixels=image.max_pixels or image.size.longest_edge,
        frame_min_pixels=video.size.shortest_edge,
        frame_max_pixels=video.size.longest_edge,
        fps=video.fps,
        min_frames=video.min_frames,
        max_frames=video.max_frames,
        cap_pixels_per_frame=video.cap_pixels_per_frame,
        max_video_tokens=video.max_video_tokens,
        sampling_rate=audio.sampling_rate,
        num_mel_bins=audio.feature_size,
        n_fft=audio.n_fft,
        hop_length=audio.hop_length,
    )
    if config.image_min_pixels > config.image_max_pixels:
        raise CheckpointError(
            f"{image_from}: min_pixels {config.image_min_pixels} is above max_pixels {config.image_max_pixels}"
        )
    _check_fits(config, load_config(folder).media, {"image": image_from, "audio": audio_from})
    return config


Part = TypeVar("Part", _Image, _Video, _Audio)


def _part(
    folder: Path, names: tuple[str, ...], files: tuple[str, ...], shape: type[Part], ignore: str = ""
) -> tuple[Part, str]:
    """One part's settings, and where they were found. A null counts as not written."""
    raw, source = _find(folder, names, files)
    settings = {key: value for key, value in raw.items() if value is not None and key != ignore}
    try:
        return msgspec.convert(settings, shape), source
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _find(folder: Path, names: tuple[str, ...], files: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    nested = _read(folder / "processor_config.json") or {}
    for name in names:
        part = nested.get(name)
        if isinstance(part, dict):
            return part, f"{folder / 'processor_config.json'}: {name}"
        if part is not None:
            raise CheckpointError(f"{folder / 'processor_config.json'}: {name} is not a JSON object")
    for file in files:
        found = _read(folder / file)
        if found is not None:
            return found, str(folder / file)
    raise CheckpointError(f"{folder / files[-1]} is missing: it says how images, audio and video are prepared")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a JSON object: {error}") from error


def _check_supported(part: _Image, source: str) -> None:
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if not getattr(part, key):
            raise CheckpointError(f"{source}: {key} false is not supported")
    if part.resample != BICUBIC:
        raise CheckpointError(f"{source}: resample {part.resample} is not supported; it must be {BICUBIC} (bicubic)")


def _check_fits(config: PreprocessorConfig, media: MediaConfig, sources: dict[str, str]) -> None:
    for part, key, have, want in (
        ("image", "patch_size", config.patch_size, media.patch_size),
        ("image", "temporal_patch_size", config.temporal_patch_size, media.temporal_patch_size),
        ("image", "merge_size", config.merge_size, media.spatial_merge_size),
        ("audio", "feature_size", config.num_mel_bins, media.num_mel_bins),
    ):
        if have != want:
            raise CheckpointError(f"{sources[part]}: {key} is {have}, but config.json builds the encoder for {want}")
