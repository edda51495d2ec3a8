"""Images that are larger, other, or elsewhere than they seem."""

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from tests.attack.attack import Attack, Outcome
from tests.attack.media_files import MAX_RSS_MIB, REFUSED, FileAttack, ask, base64_of, listener, many, served
from tests.attack.target import Setup, Target
from tests.gpu_worker.towers.test_image_file import bomb

SETUP = Setup(reads_images=True, flags=("--allowed-media-domains", "localhost,pictures.localhost"))


def picture(kind: str = "PNG", width: int = 64, height: int = 48, mode: str = "RGB", **options: Any) -> bytes:
    """Return an image file."""
    data = io.BytesIO()
    Image.new(mode, (width, height), 3 if mode == "I;16" else None).save(data, kind, **options)
    return data.getvalue()


def animation(kind: str, frames: int = 500) -> bytes:
    """Return a file with many pictures."""
    each = [Image.new("RGB", (64, 48), (number % 256, 0, 0)) for number in range(frames)]
    data = io.BytesIO()
    each[0].save(data, kind, save_all=True, append_images=each[1:])
    return data.getvalue()


def noise() -> bytes:
    """Return a picture of 16 bits in each pixel."""
    values = np.random.default_rng(0).integers(0, 65535, (48, 64), dtype=np.uint16)
    data = io.BytesIO()
    Image.fromarray(values).save(data, "PNG")
    return data.getvalue()


HARMLESS: dict[str, Callable[[], bytes]] = {
    "16-bit": noise,
    "cmyk": partial(picture, "JPEG", mode="CMYK"),
    "animated-gif": partial(animation, "GIF"),
    "animated-webp": partial(animation, "WEBP", 50),
    "png-then-zip": lambda: picture() + b"PK\x03\x04" + bytes(4096),
    "png-then-html": lambda: picture() + b"<script>alert(1)</script>",
}
"""They are what they say, and more that is not looked at."""
HARMFUL: dict[str, Callable[[], bytes]] = {
    "bomb": partial(bomb, 16_384, 16_384),
    "narrow": partial(picture, width=4020, height=20),
    "narrow-line": partial(picture, width=1, height=201),
    "cut": lambda: picture("JPEG", 640, 480)[:300],
    "cut-header": lambda: picture()[:20],
    "svg": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "html-then-png": lambda: b"<html>" + picture(),
    "eps": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
    "tiff": partial(picture, "TIFF"),
    "bmp": partial(picture, "BMP"),
    "empty": bytes,
}


def _part(file: bytes) -> dict[str, object]:
    return _named("data:image/png;base64," + base64_of(file))


def _named(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


files = FileAttack(_part, picture, HARMLESS, HARMFUL).run


def private_urls(target: Target) -> Outcome:
    """Name hosts of this machine, of its networks and of a cloud; nothing may be dialled."""
    served(target, _part, picture())
    with listener() as (port, reached):
        urls = [
            *(
                f"http://{host}:{port}/a.png"
                for host in ("localhost", "127.0.0.1", "[::1]", "2130706433", "0x7f000001")
            ),
            *(
                f"http://{host}:{port}/a.png"
                for host in ("127.1", "0", "pictures.localhost", "localhost.", "LOCALHOST")
            ),
            f"http://localhost:{port}@example.com/a.png",
            f"http://example.com@localhost:{port}/a.png",
            "http://169.254.169.254/latest/meta-data/",
            "http://[::ffff:169.254.169.254]/",
            "https://10.0.0.1/a.png",
            *("file:///etc/passwd", "ftp://localhost/a.png", "gopher://localhost/_", "//localhost/a.png", "data:", "x"),
            "data:text/html;base64,PGh0bWw+",
            "data:image/png;base64,%%%%",
        ]
        answers = {url: ask(target, _named, url)[0] for url in urls}
    wrong = [f"{url} was answered with {status}" for url, status in answers.items() if status not in REFUSED]
    wrong += [f"{address} was connected to" for address in reached]
    return Outcome(f"{len(urls)} refused", wrong)


def many_images(target: Target, num: int = 2000) -> Outcome:
    """Send one request with so many images."""
    return many(target, _part, picture(width=8, height=8), num)


ATTACKS = [
    Attack("image-files", files, SETUP, max_rss=MAX_RSS_MIB),
    Attack("image-urls", private_urls, SETUP, max_rss=MAX_RSS_MIB),
    Attack("image-many", many_images, SETUP, max_rss=MAX_RSS_MIB),
]
