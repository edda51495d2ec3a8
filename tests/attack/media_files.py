"""Sends files of images, videos and sounds that are not what they seem, each several times at once."""

import base64
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil

from tests.attack.attack import MIB, Outcome
from tests.attack.target import MODEL, Target
from tests.attack.wire import request

MAX_RSS_MIB = 300
MAX_ENCODER_MIB = 2500
"""Of all processes of the encoder together, which hold torch and the tiny tower."""
REFUSED = {400, 403, 413, 422, 429, 503}
MakePart = Callable[[Any], Mapping[str, Any]]
"""Returns the part of a turn that shows or plays a file, which is given as its bytes or its URL."""


def ask(target: Target, part: MakePart, *files: Any) -> tuple[int, Any]:
    """Send one chat with these files; return the status and the answer."""
    content = [*map(part, files), {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": content}]
    return request(target, target.key, "/v1/chat/completions", model=MODEL, messages=messages, max_tokens=4)


def served(target: Target, part: MakePart, file: bytes) -> None:
    """Raise ``AssertionError`` unless a file that is nothing but what it seems is answered."""
    status, answer = ask(target, part, file)
    assert status == 200, answer


class FileAttack:
    """Holds what is sent of one kind of files, by name."""

    def __init__(
        self,
        part: MakePart,
        usual: Callable[[], bytes],
        harmless: Mapping[str, Callable[[], bytes]],
        harmful: Mapping[str, Callable[[], bytes]],
        odd: Mapping[str, Callable[[], bytes]] | None = None,
        elsewhere: Mapping[str, Callable[[int], bytes]] | None = None,
    ) -> None:
        """``usual``: a file that is nothing but what it seems. ``odd``: those of which a part may be read.
        ``elsewhere``: those that name a port of this machine, of which some have something to read besides."""
        self._part, self._usual = part, usual
        self._harmless, self._elsewhere = harmless, elsewhere or {}
        self._makers = {**harmless, **harmful, **(odd or {})}
        self._odd = frozenset(odd or {})

    def run(self, target: Target, names: Sequence[str] = (), at_once: int = 4) -> Outcome:
        """Send each file ``at_once`` times at once. What is harmless is answered, what is not is refused, and what
        names another host reaches none."""
        served(target, self._part, self._usual())
        wrong = []
        with listener() as (port, reached):
            makers = self._makers | {name: partial(make, port) for name, make in self._elsewhere.items()}
            for name, make in makers.items():
                if names and name not in names:
                    continue
                file = make()
                with ThreadPoolExecutor(at_once) as pool:
                    answers = pool.map(partial(ask, target, self._part), [file] * at_once)
                    statuses = {status for status, _ in answers}
                if not statuses <= self._expected(name):
                    wrong.append(f"{name} was answered with {statuses}")
        wrong += [f"{address} was connected to" for address in reached]
        served(target, self._part, self._usual())
        if (memory := encoder_memory(target)) > MAX_ENCODER_MIB:
            wrong.append(f"the encoder's processes have {memory:.0f} MiB")
        return Outcome(f"encoder {memory:.0f} MiB", wrong)

    def _expected(self, name: str) -> set[int]:
        if name in self._harmless:
            return {200}
        # A MOV may hold what it says lies elsewhere.
        return REFUSED | {200} if name in self._odd or name.startswith("elsewhere") else REFUSED


def many(target: Target, part: MakePart, file: bytes, num: int) -> Outcome:
    """Send one request with ``num`` times a file."""
    served(target, part, file)
    status, _ = ask(target, part, *[file] * num)
    return Outcome(str(status), [] if status in REFUSED else [f"answered with {status}"])


def base64_of(file: bytes) -> str:
    return base64.b64encode(file).decode()


def encoder_memory(target: Target) -> float:
    """Return the memory of all processes of the encoder, in MiB."""
    encoder = target.process("encoder")
    return sum(_rss(each) for each in (encoder, *encoder.children(recursive=True))) / MIB


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:  # replaced meanwhile
        return 0


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
