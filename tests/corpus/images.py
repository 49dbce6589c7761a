"""Pictures as cameras, browsers, scanners and designers write them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms

from tests.corpus.file import CorpusFile, Pixels, picture

ORIENTATION = 0x0112
# What a viewer does with a stored picture of each EXIF orientation, axes being height, width, colour.
UPRIGHT: dict[int, Callable[[Any], Any]] = {
    1: lambda image: image,
    2: lambda image: image[:, ::-1],
    3: lambda image: image[::-1, ::-1],
    4: lambda image: image[::-1],
    5: lambda image: image.swapaxes(0, 1),
    6: lambda image: image[::-1].swapaxes(0, 1),
    7: lambda image: image[::-1, ::-1].swapaxes(0, 1),
    8: lambda image: image[:, ::-1].swapaxes(0, 1),
}
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def on_white(rgba: np.ndarray[Any, Any]) -> Pixels:
    """What is seen of a transparent picture on a white page."""
    colour, alpha = rgba[..., :3].astype(np.float64), rgba[..., 3:].astype(np.float64) / 255
    return np.round(colour * alpha + 255 * (1 - alpha)).astype(np.uint8)


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_rows(values: np.ndarray[Any, Any], bits: int) -> bytes:
    """Rows without filter; `values` are whole numbers, [height, width] or [height, width, channels]."""
    flat = values.reshape(len(values), -1)
    if bits == 16:
        rows = flat.astype(">u2").view(np.uint8)
    elif bits == 8:
        rows = flat.astype(np.uint8)
    else:
        spread = (flat[..., None].astype(np.uint8) >> np.arange(bits - 1, -1, -1, dtype=np.uint8)) & 1
        rows = np.packbits(spread.reshape(len(flat), -1), axis=1)
    return b"".join(b"\0" + row.tobytes() for row in np.ascontiguousarray(rows))


def png(values: np.ndarray[Any, Any], bits: int, colour: int, *, extra: bytes = b"", interlaced: bool = False) -> bytes:
    """A PNG of any colour type and depth. 0: grey, 2: RGB, 3: palette (in `extra`), 4: grey and alpha, 6: RGBA."""
    height, width = values.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlaced)
    passes = [values[y::dy, x::dx] for x, y, dx, dy in ADAM7] if interlaced else [values]
    rows = b"".join(png_rows(part, bits) for part in passes if part.size)
    body = png_chunk(b"IHDR", header) + extra + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def pngs(folder: Path) -> Iterator[CorpusFile]:
    """Every colour type and depth."""

    def file(name: str, data: bytes, frames: Pixels) -> CorpusFile:
        path = folder / f"{name}.png"
        path.write_bytes(data)
        return CorpusFile(name=name, kind="image", path=path, frames=frames)

    rgb = picture("png", 45, 37)[0]
    grey = rgb[..., 0].astype(np.uint32)
    alpha = picture("png alpha", 45, 37)[0, ..., 1]
    for bits in (1, 2, 4, 8):
        values = grey >> (8 - bits)
        shown = values * 255 // (2**bits - 1)
        yield file(f"png-grey-{bits}", png(values, bits, 0), np.repeat(shown[None, ..., None], 3, -1).astype(np.uint8))
        colours = np.random.default_rng(bits).integers(0, 256, (2**bits, 3), np.uint8)
        palette = png_chunk(b"PLTE", colours.tobytes())
        yield file(f"png-palette-{bits}", png(values, bits, 3, extra=palette), colours[values][None])
    see_through = np.random.default_rng(9).integers(0, 256, 200, np.uint8)  # fewer than colours: the rest are opaque
    opacity = np.append(see_through, np.full(56, 255, np.uint8))[grey]
    half = palette + png_chunk(b"tRNS", see_through.tobytes())
    frames = on_white(np.dstack([colours[grey], opacity])[None])
    yield file("png-palette-transparent", png(grey, 8, 3, extra=half), frames)
    yield file("png-rgb", png(rgb, 8, 2), rgb[None])
    yield file("png-rgb-interlaced", png(rgb, 8, 2, interlaced=True), rgb[None])
    yield file("png-rgba", png(np.dstack([rgb, alpha]), 8, 6), on_white(np.dstack([rgb, alpha])[None]))
    clear = np.dstack([rgb, np.zeros_like(alpha)])
    yield file("png-rgba-all-clear", png(clear, 8, 6), on_white(clear[None]))
    soft = np.dstack([np.repeat(grey[..., None], 3, -1).astype(np.uint8), alpha])
    yield file("png-grey-alpha", png(np.dstack([grey, alpha]), 8, 4), on_white(soft[None]))
    keyed = rgb.copy()
    keyed[5:20, 5:20] = (1, 2, 3)
    key = png_chunk(b"tRNS", struct.pack(">HHH", 1, 2, 3))
    masked = np.dstack([keyed, np.where((keyed == (1, 2, 3)).all(-1), 0, 255)])
    yield file("png-rgb-key", png(keyed, 8, 2, extra=key), on_white(masked[None]))
    wide = rgb.astype(np.uint32) * 257
    yield file("png-grey-16", png(wide[..., 0], 16, 0), np.repeat(rgb[None, ..., :1], 3, -1))
    yield file("png-rgb-16", png(wide, 16, 2), rgb[None])
    yield file("png-rgba-16-interlaced", png(np.dstack([wide, alpha.astype(np.uint32) * 257]), 16, 6, interlaced=True),
               on_white(np.dstack([rgb, alpha])[None]))  # fmt: skip
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    body = png_chunk(b"eXIf", turned.tobytes().removeprefix(b"Exif\0\0"))
    yield file("png-exif-turned", png(rgb, 8, 2, extra=body), UPRIGHT[6](rgb)[None])
    out = io.BytesIO()
    moving = [Image.fromarray(picture(f"apng {number}", 40, 30)[0]) for number in range(3)]
    moving[0].save(out, "PNG", save_all=True, append_images=moving[1:], duration=100)
    yield file("png-animated", out.getvalue(), np.asarray(moving[0])[None])


def jpegs(folder: Path) -> Iterator[CorpusFile]:
    def file(name: str, image: Image.Image, shown: Pixels | None, near: float = 4.0, **options: Any) -> CorpusFile:
        path = folder / f"{name}.jpg"
        image.save(path, "JPEG", **({"quality": 92} | options))
        return CorpusFile(name=name, kind="image", path=path, frames=shown, near=near)

    frames = picture("jpeg", 90, 61)
    rgb = Image.fromarray(frames[0])
    yield file("jpeg-444", rgb, frames, subsampling=0)
    yield file("jpeg-420", rgb, frames, near=8.0, subsampling=2)
    yield file("jpeg-progressive", rgb, frames, near=8.0, progressive=True)
    yield file("jpeg-restart-markers", rgb, frames, near=8.0, restart_marker_rows=1)
    yield file("jpeg-grey", rgb.convert("L"), np.repeat(np.asarray(rgb.convert("L"))[None, ..., None], 3, -1))
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    yield file("jpeg-srgb-profile", rgb, frames, near=8.0, icc_profile=profile)
    inks = rgb.convert("CMYK")
    yield file("jpeg-cmyk", inks, frames, near=8.0)
    mixed = file("jpeg-ycck", inks, None)
    data = mixed.path.read_bytes()
    at = data.index(b"Adobe") + 11  # the transform: 2 says that the first three inks are stored as YCbCr
    mixed.path.write_bytes(data[:at] + b"\2" + data[at + 1 :])
    yield mixed
    for orientation, upright in UPRIGHT.items():
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        yield file(f"jpeg-orientation-{orientation}", rgb, upright(frames[0])[None], subsampling=0, exif=exif)
    exif = Image.Exif()
    exif[ORIENTATION] = 77
    yield file("jpeg-orientation-unknown", rgb, frames, subsampling=0, exif=exif)
    small = Image.fromarray(picture("camera", 816, 612)[0])
    large = np.asarray(small.resize((3264, 2448), Image.Resampling.BICUBIC))[None]
    exif[ORIENTATION] = 6
    photo = file("jpeg-8-megapixels", Image.fromarray(large[0]), UPRIGHT[6](large[0])[None], exif=exif, quality=80)
    yield photo


# name, ending, Pillow's format, mode, options
OTHERS: Sequence[tuple[str, str, str, str, dict[str, Any]]] = (
    ("webp-lossless", "webp", "WEBP", "RGB", {"lossless": True}),
    ("webp-lossless-alpha", "webp", "WEBP", "RGBA", {"lossless": True, "exact": True}),
    ("webp-lossy", "webp", "WEBP", "RGB", {"quality": 90}),
    ("gif", "gif", "GIF", "P", {}),
    ("gif-interlaced-off", "gif", "GIF", "P", {"interlace": 0}),
    ("gif-grey", "gif", "GIF", "L", {}),
    ("bmp-1", "bmp", "BMP", "1", {}),
    ("bmp-8", "bmp", "BMP", "L", {}),
    ("bmp-palette", "bmp", "BMP", "P", {}),
    ("bmp-24", "bmp", "BMP", "RGB", {}),
    ("bmp-32", "bmp", "BMP", "RGBA", {}),
    ("tiff-lzw", "tiff", "TIFF", "RGB", {"compression": "tiff_lzw"}),
    ("tiff-deflate", "tif", "TIFF", "RGBA", {"compression": "tiff_adobe_deflate"}),
    ("tiff-packbits", "tif", "TIFF", "L", {"compression": "packbits"}),
    ("tiff-fax", "tif", "TIFF", "1", {"compression": "group4"}),
    ("tiff-palette", "tif", "TIFF", "P", {}),
    ("tiff-cmyk", "tif", "TIFF", "CMYK", {"compression": "tiff_lzw"}),
    ("tiff-jpeg", "tif", "TIFF", "RGB", {"compression": "jpeg"}),
    ("ppm", "ppm", "PPM", "RGB", {}),
    ("pgm", "pgm", "PPM", "L", {}),
    ("avif", "avif", "AVIF", "RGB", {"quality": 90}),
    ("avif-alpha", "avif", "AVIF", "RGBA", {"quality": 90}),
    ("jpeg-2000", "jp2", "JPEG2000", "RGB", {}),
    ("ico", "ico", "ICO", "RGBA", {"sizes": [(45, 37)]}),
)
LOSSY = {"webp-lossy": 10.0, "tiff-jpeg": 12.0, "avif": 10.0, "avif-alpha": 10.0}


def others(folder: Path) -> Iterator[CorpusFile]:
    rgb = picture("others", 45, 37)[0]
    alpha = picture("others alpha", 45, 37)[0, ..., 2]
    for name, ending, kind, mode, options in OTHERS:
        image = Image.fromarray(np.dstack([rgb, alpha])) if mode == "RGBA" else Image.fromarray(rgb).convert(mode)
        path = folder / f"{name}.{ending}"
        image.save(path, kind, **options)
        shown = np.asarray(image.convert("RGB"))
        if mode == "RGBA" and kind != "BMP":  # the fourth byte of a plain 32-bit BMP means nothing
            shown = on_white(np.asarray(image))
        yield CorpusFile(name=name, kind="image", path=path, frames=shown[None], near=LOSSY.get(name))

    def saved(name: str, ending: str, images: list[Image.Image], shown: Pixels, **options: Any) -> CorpusFile:
        path = folder / f"{name}.{ending}"
        images[0].save(path, save_all=len(images) > 1, append_images=images[1:], **options)
        return CorpusFile(name=name, kind="image", path=path, frames=shown)

    pages = [Image.fromarray(picture(f"page {number}", 40, 30)[0]) for number in range(4)]
    first = np.asarray(pages[0])[None]
    yield saved("tiff-pages", "tif", pages, first, compression="tiff_lzw")
    yield saved("webp-animated", "webp", pages, first, lossless=True, duration=80)
    flat = [page.quantize(64) for page in pages]
    yield saved("gif-animated", "gif", flat, np.asarray(flat[0].convert("RGB"))[None], duration=80, loop=0)
    holes = flat[0].copy()
    seen = np.asarray(holes.convert("RGB")).copy()
    seen[np.asarray(holes) == 3] = 255
    yield saved("gif-transparent", "gif", [holes], seen[None], transparency=3)

    wide = rgb[..., 0].astype(np.uint16) * 257
    shown = np.repeat(rgb[None, ..., :1], 3, -1)
    yield saved("tiff-grey-16", "tif", [Image.fromarray(wide)], shown)
    yield saved("tiff-float", "tif", [Image.fromarray((rgb[..., 0] / np.float32(255)).astype(np.float32))], shown)


SHAPES = ((1, 1), (2, 1), (3, 500), (500, 3), (5000, 30), (28, 28), (33, 32), (1, 200), (1000, 999))


def shapes(folder: Path) -> Iterator[CorpusFile]:
    for width, height in SHAPES:
        frames = picture(f"{width} x {height}", width, height)
        path = folder / f"shape-{width}x{height}.png"
        path.write_bytes(png(frames[0], 8, 2))
        yield CorpusFile(name=path.stem, kind="image", path=path, frames=frames)


def image_files(folder: Path) -> Iterator[CorpusFile]:
    folder.mkdir(parents=True, exist_ok=True)
    yield from pngs(folder)
    yield from jpegs(folder)
    yield from others(folder)
    yield from shapes(folder)
