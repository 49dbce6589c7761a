"""What a plain decoder makes of a good file, and the features of that: what the server's workers must arrive at."""

from __future__ import annotations

import math

import av
import numpy as np
import soxr
from numpy.typing import NDArray
from PIL import Image, ImageOps

from tests.corpus.file import CorpusFile, Pixels, Samples
from triptych.media.contract import MediaOptions
from triptych.models.qwen3_omni.audio_features import log_mel
from triptych.models.qwen3_omni.image_features import resize_image
from triptych.models.qwen3_omni.preprocessor_config import PreprocessorConfig
from triptych.models.qwen3_omni.video_features import resize_frames, sample_frames

HEARD = 16000  # samples a second that the encoder hears


def plain_sound(file: CorpusFile) -> tuple[Samples, int]:
    """Everything that PyAV decodes of the first audio stream: [channels, samples], and their rate."""
    parts = []
    with av.open(str(file.path)) as container:
        stream = container.streams.audio[0]
        for frame in container.decode(stream):
            part = frame.to_ndarray()
            if not frame.format.is_planar:
                part = part.reshape(-1, frame.layout.nb_channels).T
            if part.dtype == np.uint8:
                part = part.astype(np.float64) / 128 - 1
            elif part.dtype.kind == "i":
                part = part / 2.0 ** (8 * part.dtype.itemsize - 1)
            parts.append(part.astype(np.float32))
        return np.concatenate(parts, axis=1), stream.sample_rate


def plain_image(file: CorpusFile) -> Pixels:
    """What Pillow shows of the first picture, upright and on white: [1, height, width, 3]."""
    with Image.open(file.path) as image:
        upright = ImageOps.exif_transpose(image)
        if upright.has_transparency_data:
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        return np.asarray(upright.convert("RGB"))[None]


def plain_film(file: CorpusFile) -> tuple[Pixels, float]:
    """Every frame that PyAV decodes, turned upright, and how many there are a second by the header."""
    with av.open(str(file.path)) as container:
        stream = container.streams.video[0]
        frames = [
            np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90) for frame in container.decode(stream)
        ]
        return np.stack(frames), float(stream.average_rate)


def content(file: CorpusFile) -> tuple[Samples | None, int, Pixels | None]:
    """Samples with their rate, and frames: the file's own where it is lossless, else those of a plain decoder."""
    samples, rate, frames = file.samples, file.rate, file.frames
    if file.samples is not None and (file.near is not None or file.kind == "video"):
        samples, rate = plain_sound(file)
    if file.kind == "image" and (frames is None or file.near is not None):
        frames = plain_image(file)
    if file.kind == "video" and file.near is not None:
        frames, _ = plain_film(file)
    return samples, rate, frames


def heard(samples: Samples, rate: int) -> NDArray[np.float32]:
    """The mean of the channels at 16 kHz, [ceil(samples * 16000 / rate)]."""
    mono: NDArray[np.float32] = samples.mean(axis=0, dtype=np.float64).astype(np.float32)
    if rate == HEARD:
        return mono
    changed = soxr.resample(mono, rate, HEARD, quality="HQ").astype(np.float32)
    wanted = math.ceil(len(mono) * HEARD / rate)
    padded: NDArray[np.float32] = np.pad(changed, (0, max(0, wanted - len(changed))))
    return padded[:wanted]


def spectrogram(samples: Samples, rate: int, config: PreprocessorConfig) -> NDArray[np.float32]:
    return log_mel(heard(samples, rate), config)


def seen(frames: Pixels, file: CorpusFile, config: PreprocessorConfig, options: MediaOptions) -> Pixels:
    """The frames that the encoder sees, as it wants them."""
    if file.kind == "image":
        return resize_image(np.ascontiguousarray(frames[0]), config, options)[0]
    _, rate = plain_film(file)
    wanted = sample_frames(len(frames), rate, config, options)
    return resize_frames(frames[wanted], config, options)[0]


def likeness(one: Samples, other: Samples, rate: int, other_rate: int) -> float:
    """The correlation of two recordings at their best alignment: codecs delay what they code."""
    first, second = heard(one, rate), heard(other, other_rate)
    size = 1 << (len(first) + len(second)).bit_length()
    product = np.fft.irfft(np.fft.rfft(first, size) * np.conj(np.fft.rfft(second, size)))
    norm = math.sqrt(float((first**2).sum()) * float((second**2).sum()))
    near = np.concatenate([product[:4000], product[-4000:]])
    return float(near.max()) / norm
