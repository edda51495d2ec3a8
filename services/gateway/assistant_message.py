"""An assistant's turn, as it grows."""

from typing import Protocol


class Message(Protocol):
    """One output of a chat.

    Attributes:
        num_calls: Tool calls that began.
    """

    num_calls: int

    def feed(self, text: str, *, ends: bool) -> dict[str, object]:
        """What some more text adds, as a ``delta``; ``ends``: it is the last."""

    def whole(self) -> dict[str, object]:
        """All of it, as a ``message``."""


class PlainMessage:
    """Text, and no more."""

    num_calls = 0

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str, *, ends: bool) -> dict[str, object]:
        self._text += text
        return {"content": text}

    def whole(self) -> dict[str, object]:
        return {"role": "assistant", "content": self._text}
