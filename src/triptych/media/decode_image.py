"""An image file to the pixels that a viewer shows: upright, opaque, eight bits a channel.

What Transformers does to an image that it is given (`image_transforms.convert_to_rgb`): transparency is composed over
white. Besides, as `image_utils.load_image`, the orientation tag is obeyed. Sixteen-bit and floating point greys, which
Pillow would clip to white, are scaled. Of an animation the first picture counts; colour profiles are ignored.
"""

from __future__ import annotations

import io
import logging
import warnings

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from triptych.errors import RequestError
from triptych.media.sniff import FileType

logger = logging.getLogger(__name__)

MAX_ASPECT_RATIO = 200  # of the processors
_ORIENTATION = 0x0112  # the tag's number
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Pixels = npt.NDArray[np.uint8]


class OpenImage:
    """An image whose header has been read and whose pixels have not."""

    def __init__(self, data: bytes, file: FileType, max_pixels: int) -> None:
        """Raises RequestError (without its `param`) for an image that is damaged, too large or too narrow."""
        self._name = file.name
        self._max_pixels = max_pixels
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                # Sizes are checked below; but an ICO file is decoded as it is opened, whatever is inside.
                Image.MAX_IMAGE_PIXELS = max_pixels if file.name == "ICO" else None
                self._image = Image.open(io.BytesIO(data), formats=[file.name])
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise self._too_large("the picture inside has more pixels than the header says") from error
        except MemoryError:
            raise
        except Exception as error:  # a decoder may raise anything on a file made to break it
            raise self._damaged(error) from error
        self._check_size(self._image.size)

    @property
    def stored_size(self) -> tuple[int, int]:
        """Height and width before it is turned upright."""
        return self._image.height, self._image.width

    def pixels(self) -> Pixels:
        """uint8 [height, width, 3], upright and opaque. Raises RequestError for an image that is damaged or cut off."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._image.load()
                return np.array(to_rgb(upright(self._image)))
        except (MemoryError, RequestError):
            raise
        except Exception as error:
            raise self._damaged(error) from error

    def _check_size(self, size: tuple[int, int]) -> None:
        width, height = size
        if width * height > self._max_pixels:
            raise self._too_large(f"{width} x {height} = {width * height} pixels")
        if min(size) < 1:
            raise RequestError(f"the image has {width} x {height} pixels: nothing to see")
        if max(size) > MAX_ASPECT_RATIO * min(size):
            raise RequestError(
                f"the image is {width} x {height} pixels: one side may be at most {MAX_ASPECT_RATIO} times the other; "
                "cut it into pieces"
            )

    def _too_large(self, what: str) -> RequestError:
        return RequestError(
            f"the image is too large ({what}): at most {self._max_pixels} pixels, the limit 'media.max_image_pixels'; "
            "send a smaller one"
        )

    def _damaged(self, error: Exception) -> RequestError:
        why = "it makes no sense" if isinstance(error, UnidentifiedImageError) else str(error) or type(error).__name__
        return RequestError(f"this {self._name} image is damaged or cut off: it cannot be decoded ({why[:200]})")


def upright(image: Image.Image) -> Image.Image:
    """Turned as its orientation tag says. A damaged tag counts as none, as in every viewer."""
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception as error:
        logger.debug("an image's orientation tag cannot be read: %r", error)
        return image
    method = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if method is None else image.transpose(method)


def to_rgb(image: Image.Image) -> Image.Image:
    """Opaque RGB: transparency over white, greys of more than eight bits scaled to the range of bytes."""
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        return Image.fromarray(_scaled_grey(image)).convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _scaled_grey(image: Image.Image) -> Pixels:
    """Sixteen-bit values by their full scale, floats in [0, 1] likewise; what has no full scale from least to most."""
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise RequestError("the image has values that are not numbers (NaN or infinite)")
    low, high = float(values.min()), float(values.max())
    if image.mode == "F" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif image.mode != "F" and low >= 0 and high <= 65535:
        low, high = 0.0, 65535.0
    grey = np.rint((values - low) * (255.0 / (high - low) if high > low else 0.0)).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return grey
