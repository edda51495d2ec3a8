"""Which images are read, how large they are as shown, and what is refused before its pixels are decoded."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.checkpoints.vision_prompts import picture
from tokenloom.gpu_worker.towers.image_file import BadImage, image_size, read_image


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def bomb(width: int, height: int) -> bytes:
    """Return a black PNG, without ever holding its pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packer, line = zlib.compressobj(9), bytes(1 + 3 * width)
    body = b"".join(packer.compress(line) for _ in range(height)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_data_say(kind: str, orientation: int) -> None:
    image = picture(40, 24)
    exif = image.getexif()
    exif[0x0112] = orientation
    data = encoded(image, kind, exif=exif)
    found, expected = read_image(data), ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert found.size == image_size(data) == expected.size == ((24, 40) if orientation > 4 else (40, 24))
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_an_image_is_turned_as_its_xmp_data_say(kind: str) -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    data = encoded(picture(40, 24), kind, xmp=xmp)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert image_size(data) == read_image(data).size == expected.size == (24, 40)
    assert read_image(data).tobytes() == expected.tobytes()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_modes_become_what_transformers_makes_of_them(mode: str) -> None:
    data = encoded(picture(20, 10).convert(mode))
    assert read_image(data).tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def test_sixteen_bits_keep_their_shades() -> None:
    values = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
    read = np.asarray(read_image(encoded(Image.fromarray(values))))
    assert read[..., 0].tolist() == np.arange(256).reshape(16, 16).tolist()


def test_inks_become_colours() -> None:
    data = encoded(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "JPEG")
    red, green, blue = read_image(data).getpixel((0, 0))  # type: ignore[misc]
    assert red > 200
    assert max(green, blue) < 60


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_counts(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
    assert read_image(data).getpixel((3, 3)) == (255, 0, 0) or kind == "GIF"
    assert read_image(data).getpixel((3, 3))[0] > 200  # type: ignore[index]


def test_an_image_of_many_pixels_is_refused_by_its_header() -> None:
    data = bomb(9000, 9000)
    assert len(data) < 1 << 19
    for read in (image_size, read_image):
        with pytest.raises(BadImage, match="9000 x 9000"):
            read(data)


@pytest.mark.parametrize(("width", "height", "is_taken"), [(200, 1, True), (201, 1, False), (1, 201, False)])
def test_narrow_images_are_refused(width: int, height: int, is_taken: bool) -> None:
    data = encoded(picture(width, height))
    if is_taken:
        assert image_size(data) == (width, height)
    else:
        with pytest.raises(BadImage, match="ratio"):
            image_size(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_file_that_was_cut_is_refused(kind: str) -> None:
    data = encoded(picture(64, 48), kind)
    with pytest.raises(BadImage):
        read_image(data[: len(data) * 2 // 3])


@pytest.mark.parametrize("data", [b"", b"x" * 99, b"%PDF-1.4\n", b"<svg/>", encoded(picture(8, 8), "BMP")])
def test_other_formats_are_refused(data: bytes) -> None:
    with pytest.raises(BadImage, match="PNG, JPEG, WebP or GIF"):
        image_size(data)


def test_damaged_exif_data_say_nothing() -> None:
    data = encoded(picture(40, 24), exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    assert image_size(data) == (40, 24)
