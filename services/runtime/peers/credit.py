"""Flow control of shared streams: the receiver grants frames, the sender takes one for each frame it sends."""

import asyncio


class Credit:
    """Frames that a peer is ready to take. One waiter at a time (the stream's writer)."""

    def __init__(self, initial: int = 0) -> None:
        self._left = initial
        self._granted = asyncio.Event()
        if initial:
            self._granted.set()

    @property
    def left(self) -> int:
        return self._left

    def grant(self, frames: int) -> None:
        """The peer takes ``frames`` more."""
        self._left += frames
        if self._left > 0:
            self._granted.set()

    def take(self) -> bool:
        """Takes one; False when there is none, and the sender should merge what it has with what comes."""
        if self._left <= 0:
            return False
        self._left -= 1
        if self._left == 0:
            self._granted.clear()
        return True

    async def wait(self) -> None:
        """Returns once there is credit, without taking any."""
        await self._granted.wait()
