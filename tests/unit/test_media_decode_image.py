"""An image comes out as a viewer shows it, or is refused with the reason, and costs what its header says at most."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageOps

from tests.media_files import image_file, noise
from triptych.errors import RequestError
from triptych.media.decode_image import OpenImage
from triptych.media.sniff import as_image


def seen(data: bytes, max_pixels: int = 10**6) -> npt.NDArray[np.uint8]:
    pixels = OpenImage(data, as_image(data), max_pixels).pixels()
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
    return pixels


@pytest.mark.parametrize("form", ["PNG", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "ICO", "AVIF", "GIF", "JPEG"])
def test_every_format_is_told_by_its_content(form: str) -> None:
    picture = np.full((64, 64, 3), (200, 40, 90), np.uint8)
    options = {"lossless": True} if form == "WEBP" else {"sizes": [(64, 64)]} if form == "ICO" else {}
    made = seen(image_file(Image.fromarray(picture), form, **options))
    assert made.shape == picture.shape and np.abs(made.astype(int) - picture).max() <= 4


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "TIFF", "WEBP"])
def test_the_orientation_tag_is_obeyed(orientation: int, form: str) -> None:
    image = Image.fromarray(noise(12, 20))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = image_file(image, form, exif=exif.tobytes(), **({"lossless": True} if form == "WEBP" else {}))
    image.getexif()[0x0112] = orientation
    assert np.array_equal(seen(data), np.asarray(ImageOps.exif_transpose(image)))


def test_a_damaged_orientation_tag_counts_as_none() -> None:
    picture = noise(8, 8)
    data = image_file(Image.fromarray(picture), "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert np.array_equal(seen(data), picture)


def test_transparency_is_composed_over_white_as_transformers_does_it() -> None:
    from transformers.image_transforms import convert_to_rgb

    rgba = np.dstack([noise(16, 16), noise(16, 16, 1)[..., 0]])
    images = [Image.fromarray(rgba), Image.fromarray(rgba).convert("LA")]
    palette = Image.fromarray(noise(16, 16)).quantize(16)
    palette.info["transparency"] = 3
    images.append(palette)
    for image in images:
        made = seen(image_file(image))
        opened = image if image.mode != "P" else palette
        assert np.array_equal(made, convert_to_rgb(opened, return_numpy=True)), image.mode
    assert (seen(image_file(Image.new("RGBA", (4, 4), (9, 9, 9, 0)))) == 255).all()


def test_one_bit_palette_and_grey_are_what_they_look_like() -> None:
    picture = Image.fromarray(noise(9, 9))
    for image in (picture.convert("1"), picture.convert("P"), picture.convert("L")):
        assert np.array_equal(seen(image_file(image)), np.asarray(image.convert("RGB")))


def test_cmyk_is_not_seen_in_negative() -> None:
    red = Image.new("RGB", (16, 16), (250, 10, 10)).convert("CMYK")
    for form in ("JPEG", "TIFF"):
        assert np.abs(seen(image_file(red, form)).astype(int) - (250, 10, 10)).max() < 12


def test_sixteen_bits_are_scaled_and_not_cut() -> None:
    values = np.array([[0, 257, 32768, 65535] * 4] * 4, np.uint16)
    for form in ("PNG", "TIFF"):
        assert seen(image_file(Image.fromarray(values), form))[0, :4, 0].tolist() == [0, 1, 128, 255]


def test_floats_are_scaled_from_their_range() -> None:
    unit = np.array([[0.0, 0.25, 1.0]] * 4, np.float32)
    assert seen(image_file(Image.fromarray(unit), "TIFF"))[0, :, 1].tolist() == [0, 64, 255]
    assert seen(image_file(Image.fromarray(unit * 800 - 400), "TIFF"))[0, :, 1].tolist() == [0, 64, 255]
    assert not seen(image_file(Image.fromarray(np.full((4, 4), -3.0, np.float32)), "TIFF")).any()
    unit[0, 0] = np.nan
    with pytest.raises(RequestError, match="not numbers"):
        seen(image_file(Image.fromarray(unit), "TIFF"))


def test_an_animation_is_its_first_picture() -> None:
    frames = [Image.new("RGB", (8, 8), (60 * n, 0, 0)) for n in range(4)]
    for form in ("GIF", "PNG", "WEBP"):
        data = image_file(frames[0], form, save_all=True, append_images=frames[1:])
        assert not seen(data).any()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_a_file_that_is_cut_off_is_refused(form: str) -> None:
    data = image_file(Image.fromarray(noise(64, 64)), form)
    with pytest.raises(RequestError, match="damaged or cut off"):
        seen(data[: len(data) // 2])


def test_too_many_pixels_are_refused_by_the_header_alone() -> None:
    data = image_file(Image.new("L", (1001, 1000)))
    with pytest.raises(RequestError, match=r"1001 x 1000 = 1001000 pixels.*at most 1000000.*max_image_pixels"):
        OpenImage(data, as_image(data), 10**6)
    assert OpenImage(data, as_image(data), 2 * 10**6).stored_size == (1000, 1001)


def test_extreme_shapes_are_refused_with_the_numbers() -> None:
    assert seen(image_file(Image.new("RGB", (200, 1)))).shape == (1, 200, 3)
    with pytest.raises(RequestError, match=r"1 x 201 pixels.*200 times"):
        seen(image_file(Image.new("RGB", (1, 201))))


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG drawing"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "a PostScript file"),
        (b"%PDF-1.7\n", "a PDF document"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"RIFF\x24\0\0\0WAVEfmt ", r"an audio or video file \(wav\)"),
        (b"plain words", "unknown type that begins with 70 6c"),
    ],
)
def test_what_is_no_image_is_called_by_its_name(data: bytes, name: str) -> None:
    with pytest.raises(RequestError, match=name):
        as_image(data)
