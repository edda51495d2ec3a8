"""Pieces of JSON, joined into blocks of bounded size: a large answer is never copied as a whole."""

from collections.abc import Iterable, Iterator

BLOCK_BYTES = 64 << 10


class JsonBlocks:
    """Collects the elements of one JSON array, as bytes."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._elements: list[bytes] = []
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self._elements or self._blocks)

    def add(self, element: bytes) -> None:
        self._elements.append(element)
        self._size += len(element)
        if self._size > BLOCK_BYTES:
            self._join()

    def take(self) -> Iterator[bytes]:
        """Return the elements with commas between them, in blocks, and forget them."""
        self._join()
        blocks, self._blocks = self._blocks, []
        return joined(blocks)

    def _join(self) -> None:
        if self._elements:
            self._blocks.append(b",".join(self._elements))
            self._elements, self._size = [], 0


def joined(elements: Iterable[bytes]) -> Iterator[bytes]:
    """Yield elements, with a comma before each but the first."""
    is_first = True
    for element in elements:
        yield element if is_first else b"," + element
        is_first = False
