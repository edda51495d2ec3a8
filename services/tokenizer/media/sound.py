"""Families that hear a sound within a conversation: Qwen2-Audio."""

from dataclasses import dataclass
from typing import ClassVar

from tokenloom.v1.types_pb2 import MEDIA_KIND_AUDIO

from .media_text import Entries, MediaText, ShownMedia


@dataclass(frozen=True)
class Qwen2Audio:
    """Qwen2-Audio: a row for 40 ms of a sound."""

    token: str
    frame: int
    """Samples of a frame of the processor's."""
    rate: int
    """Samples of a second."""
    longest: int
    """Seconds of a sound, at most. The processor would cut longer ones without a word."""
    kind: ClassVar = MEDIA_KIND_AUDIO
    option_names: ClassVar[frozenset[str]] = frozenset()
    depends_on_count: ClassVar[bool] = False

    @classmethod
    def read(cls, token: str, sounds: Entries) -> "Qwen2Audio":
        rate = sounds.number("sampling_rate", 16_000)
        return cls(token, sounds.number("hop_length", 160), rate, sounds.number("chunk_length", 30))

    @property
    def mark(self) -> str:
        return self.token

    def text(self, size: ShownMedia, count: int) -> MediaText:
        if size.samples > self.longest * self.rate:
            raise ValueError(f"it lasts {size.samples / self.rate:.2f} s, and {self.longest} s are the most")
        frames = -(-size.samples // self.frame)
        halved = (frames - 1) // 2 + 1  # by a convolution, and then by pooling
        return MediaText(self.token * ((halved - 2) // 2 + 1))
