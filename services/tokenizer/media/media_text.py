"""What stands for an image, a video or a sound in a prompt's text, and how a family of models computes it from its
size."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1.types_pb2 import MediaKind

OPTIONS_FIELD = "mm_processor_kwargs"
"""How clients name the options of the processor."""


class ShownMedia(NamedTuple):
    """An image or a video as it is shown, after the turn that its data ask for; or a sound."""

    width: int = 0
    height: int = 0
    options: Mapping[str, Any] = {}
    """Of the processor, as the client has set them, each a number; what is missing is as the checkpoint's files say."""
    samples: int = 0
    """Of a sound, at the processor's rate."""
    frames: int = 0
    """Of a video."""
    rate: float = 0.0
    """Frames of a video in a second; 0: it is a list of pictures, all of which are shown, up to the model's
    limit."""


class MediaText(NamedTuple):
    """The text in place of a mark. Each token for a row is in it as often as there are rows."""

    text: str
    grid: tuple[int, int, int] = (0, 0, 0)
    """Frames, lines and columns of the rows, where rotary positions count them; zeros: they count on."""
    frame_step: float = 0.0
    """Rotary positions from a frame to the next; 0: one."""
    options_json: bytes = b""
    """What the encoder has to know; empty: the client's options."""


class MediaFamily(Protocol):
    """Knows how a family of models writes images, videos, or sounds."""

    kind: ClassVar[MediaKind]
    option_names: ClassVar[frozenset[str]]
    """The options that the processor of the family has, and a client may set."""
    depends_on_count: ClassVar[bool]
    """Whether the rows of an image that is alone in a prompt differ from those beside another one."""

    @property
    def mark(self) -> str:
        """What the chat template writes for an image, a video or a sound."""

    @property
    def token(self) -> str:
        """The token that stands for one row."""

    def text(self, size: ShownMedia, count: int) -> MediaText:
        """Return what stands for an image, a video or a sound of this size among ``count`` of a prompt.

        Raises ``ValueError`` for a size that the family refuses, ``InvalidArgument`` for an option.
        """


class Entries:
    """Reads entries of one of a checkpoint's files, of which each has to be of its type."""

    def __init__(self, values: object, name: str) -> None:
        """``name``: of the file, for errors."""
        self._values = values if isinstance(values, Mapping) else {}
        self._name = name

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def part(self, key: str) -> "Entries":
        """Return an object within the file; it has no entries if there is none."""
        return Entries(self._values.get(key), f"{self._name}: {key}")

    def number(self, key: str, default: int | None = None) -> int:
        """Return a whole number from 1 on. Raises ``InvalidArgument`` without one."""
        return self._whole(key, default, 1)

    def count(self, key: str, default: int = 0) -> int:
        """Return a whole number from 0 on. Raises ``InvalidArgument`` for anything else."""
        return self._whole(key, default, 0)

    def positive(self, key: str, default: float) -> float:
        """Return a finite number above 0. Raises ``InvalidArgument`` for anything else."""
        value = self._values.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise InvalidArgument(f"model: {self._name}: {key} must be a number above 0", "model")
        return float(value)

    def amount(self, key: str) -> float | None:
        """Return a finite number from 0 on; None: the entry is true, or missing. Raises ``InvalidArgument`` for
        anything else."""
        value = self._values.get(key)
        if value is None or value is True:
            return None
        if type(value) not in (bool, int, float) or not 0 <= value < math.inf:
            raise InvalidArgument(f"model: {self._name}: {key} must be true, false or a number from 0 on", "model")
        return float(value)

    def text(self, key: str, default: str = "") -> str:
        """Return a text; a token may be an object with its content."""
        value = self._values.get(key, default)
        value = value.get("content") if isinstance(value, Mapping) else value
        return value if isinstance(value, str) else default

    def flag(self, key: str, *, default: bool) -> bool:
        """Return whether an entry is set."""
        value = self._values.get(key)
        return default if value is None else bool(value)

    def items(self, key: str) -> Sequence[Any]:
        """Return a list; empty: there is none."""
        value = self._values.get(key)
        return value if isinstance(value, list) else ()

    def side(self, key: str, default: int | None = None) -> tuple[int, int]:
        """Return the height and the width of a square or of a rectangle. Raises ``InvalidArgument`` without them."""
        size = self.part(key)
        if "height" in size or "width" in size:
            return size.number("height"), size.number("width")
        length = size.number("shortest_edge", default) if size._values else self.number(key, default)
        return length, length

    def _whole(self, key: str, default: int | None, least: int) -> int:
        value = self._values.get(key)
        value = default if value is None else value
        if type(value) is not int or value < least:
            raise InvalidArgument(f"model: {self._name}: {key} must be a whole number from {least} on", "model")
        return value


def option(size: ShownMedia, name: str, default: int, least: int, most: int) -> int:
    """Return an option of an image. Raises ``InvalidArgument`` for one that the model does not take."""
    value: int = size.options.get(name, default)
    if not least <= value <= most:
        wanted = f"from {least} to {most}, the model's own limit"
        raise InvalidArgument(f"{OPTIONS_FIELD}.{name} must be {wanted}", f"{OPTIONS_FIELD}.{name}")
    return value


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds, of which parts are dropped."""
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_TEENS = ("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """Return a number below 1,000 in English words."""
    small, (hundreds, rest) = _ONES + _TEENS, divmod(number, 100)
    parts = [f"{small[hundreds]} hundred"] if hundreds else []
    if rest >= len(small):
        tens, ones = divmod(rest, 10)
        parts.append(_TENS[tens - 2] + (f"-{small[ones]}" if ones else ""))
    elif rest or not hundreds:
        parts.append(small[rest])
    return " and ".join(parts)
