"""Images that are larger, other, or elsewhere than they seem."""

import base64
import io
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import psutil
from PIL import Image

from tests.attack.attack import MIB, Attack, Outcome
from tests.attack.target import MODEL, Setup, Target
from tests.attack.wire import request
from tests.gpu_worker.towers.test_image_file import bomb

MAX_RSS_MIB = 300
MAX_ENCODER_MIB = 2500
"""Of all processes of the encoder together, which hold torch and the tiny tower."""
SETUP = Setup(reads_images=True, flags=("--allowed-media-domains", "localhost,pictures.localhost"))
_REFUSED = {400, 403, 413, 422, 429, 503}
_CHAT = "/v1/chat/completions"


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


def _ask(target: Target, *urls: str) -> tuple[int, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": content}]
    return request(target, target.key, _CHAT, model=MODEL, messages=messages, max_tokens=4)


def _data(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def _served(target: Target) -> None:
    status, answer = _ask(target, _data(picture()))
    assert status == 200, answer


def files(target: Target, names: tuple[str, ...] = (), at_once: int = 4) -> Outcome:
    """Send each file several times at once. What is harmless is answered, and what is not is refused."""
    _served(target)
    wrong = []
    for name, make in (HARMLESS | HARMFUL).items():
        if names and name not in names:
            continue
        url = _data(make())
        with ThreadPoolExecutor(at_once) as pool:
            statuses = {status for status, _ in pool.map(lambda _, url=url: _ask(target, url), range(at_once))}
        expected = {200} if name in HARMLESS else _REFUSED
        if not statuses <= expected:
            wrong.append(f"{name} was answered with {statuses}")
    _served(target)
    memory = encoder_memory(target)
    if memory > MAX_ENCODER_MIB:
        wrong.append(f"the encoder's processes have {memory:.0f} MiB")
    return Outcome(f"encoder {memory:.0f} MiB", wrong)


def encoder_memory(target: Target) -> float:
    """Return the memory of all processes of the encoder, in MiB."""
    encoder = target.process("encoder")
    return sum(_rss(each) for each in (encoder, *encoder.children(recursive=True))) / MIB


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:  # replaced meanwhile
        return 0


def private_urls(target: Target) -> Outcome:
    """Name hosts of this machine, of its networks and of a cloud; nothing may be dialled."""
    _served(target)
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
        answers = {url: _ask(target, url)[0] for url in urls}
    wrong = [f"{url} was answered with {status}" for url, status in answers.items() if status not in _REFUSED]
    wrong += [f"{address} was connected to" for address in reached]
    return Outcome(f"{len(urls)} refused", wrong)


@contextmanager
def listener() -> Iterator[tuple[int, list[str]]]:
    """Listen on this machine; yield the port, and who has connected."""
    reached: list[str] = []

    def accept(listening: socket.socket) -> None:
        while True:
            try:
                connection, address = listening.accept()
            except OSError:  # closed
                return
            reached.append(str(address))
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept, args=(listening,), daemon=True)
        thread.start()
        yield listening.getsockname()[1], reached
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def many_images(target: Target, num: int = 2000) -> Outcome:
    """Send one request with so many images."""
    _served(target)
    status, _ = _ask(target, *[_data(picture(width=8, height=8))] * num)
    return Outcome(str(status), [] if status in _REFUSED else [f"answered with {status}"])


ATTACKS = [
    Attack("image-files", files, SETUP, max_rss=MAX_RSS_MIB),
    Attack("image-urls", private_urls, SETUP, max_rss=MAX_RSS_MIB),
    Attack("image-many", many_images, SETUP, max_rss=MAX_RSS_MIB),
]
