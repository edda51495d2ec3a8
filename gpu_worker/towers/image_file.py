"""Reads images: how large they are, from their headers alone, and their pixels. Needs neither torch nor transformers.

An image is as it is shown: its Exif data may ask to turn it. One function reads that for the size and for the pixels,
so that the tokens that a tokenizer counts are those that a tower computes.
"""

import io
import math
import re
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""What is read. Of a file with several pictures it is the first one."""
MAX_PIXELS = 64 << 20
"""Of an image: a file of half a megabyte may hold 180 million, which take half a gigabyte once they are decoded."""
MAX_RATIO = 200
"""Of the longer side to the shorter one, as the processors of some models demand of all images."""
_ORIENTATION = 0x0112
_IN_XMP = re.compile(rb"tiff:Orientation(?:=\"|>)([0-9])")
_TURNS = {
    2: (Image.Transpose.FLIP_LEFT_RIGHT,),
    3: (Image.Transpose.ROTATE_180,),
    4: (Image.Transpose.FLIP_TOP_BOTTOM,),
    5: (Image.Transpose.TRANSPOSE,),
    6: (Image.Transpose.ROTATE_270,),
    7: (Image.Transpose.TRANSVERSE,),
    8: (Image.Transpose.ROTATE_90,),
}
_SWAPPING = (5, 6, 7, 8)


class ShownSize(NamedTuple):
    """The pixels of an image as it is shown."""

    width: int
    height: int


class BadImage(ValueError):
    """An image that is not taken; the message may be shown to clients."""


def image_size(data: bytes, max_pixels: int = MAX_PIXELS) -> ShownSize:
    """Return the size of an image without decoding its pixels. Raises :class:`BadImage`."""
    with _opened(data, max_pixels) as image:
        width, height = image.size
        return ShownSize(height, width) if _orientation(image) in _SWAPPING else ShownSize(width, height)


def read_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the pixels as RGB, as transformers' ``load_image`` returns them. Raises :class:`BadImage`."""
    with _opened(data, max_pixels) as image:
        orientation = _orientation(image)  # before the pixels: what the file holds behind them is not looked at
        try:
            image.load()
            picture = _to_rgb(image)
        except MemoryError:
            raise
        except Exception as error:  # decoders raise errors of a dozen kinds for files that are cut or damaged
            raise BadImage("The image is damaged or incomplete.") from error
    for turn in _TURNS.get(orientation, ()):
        picture = picture.transpose(turn)
    return picture


def _opened(data: bytes, max_pixels: int) -> Image.Image:
    Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit warns first and counts otherwise; ours comes before any pixel
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadImage("The image is not a PNG, JPEG, WebP or GIF.") from None
    except MemoryError:
        raise
    except Exception as error:
        raise BadImage("The image's header is damaged.") from error
    width, height = image.size
    if width * height > max_pixels:
        raise BadImage(f"The image has {width} x {height} pixels; at most {max_pixels:,} are taken.")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise BadImage(f"The image has {width} x {height} pixels; the ratio of its sides may be at most {MAX_RATIO}.")
    return image


def _orientation(image: Image.Image) -> int:
    # ``image.getexif()`` would decode a whole PNG, because its Exif chunk may follow the pixels: a file of 0.26 MB took
    # three seconds. ``info`` has what stands before them.
    exif = Image.Exif()
    try:
        exif.load(image.info.get("exif", b""))
        found = exif.get(_ORIENTATION, 1)
    except Exception:  # of any kind: damaged data say nothing of the picture
        return 1
    if _ORIENTATION not in exif and (named := _IN_XMP.search(_xmp(image))) is not None:
        return int(named[1])
    return found if isinstance(found, int) else 1


def _xmp(image: Image.Image) -> bytes:
    """Return the file's XMP data, in which some programs write the orientation alone."""
    data = image.info.get("xmp") or image.info.get("XML:com.adobe.xmp") or b""
    return data.encode() if isinstance(data, str) else bytes(data)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):  # 16 bits and more: converting them would cut all above 255 to white
        values = np.asarray(image).astype(np.float64)
        highest = 65535.0 if image.mode.startswith("I") else _highest(values)
        levels = np.rint(np.clip(values / highest, 0, 1) * 255).astype(np.uint8)
        return Image.fromarray(levels).convert("RGB")
    return image.convert("RGB")


def _highest(values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> float:
    largest = float(values.max(initial=1.0))
    return largest if math.isfinite(largest) else 1.0
