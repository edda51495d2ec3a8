"""Tracks which parts of a memory range are free."""

import bisect


class FreeSpace:
    """Allocates by first fit, which reuses low addresses and so touches few pages."""

    def __init__(self, size: int) -> None:
        self._holes: list[tuple[int, int]] = [(0, size)] if size else []  # [start, end), sorted, none touches another

    @property
    def nbytes(self) -> int:
        """Free bytes in total, possibly in several pieces."""
        return sum(end - start for start, end in self._holes)

    def take(self, nbytes: int) -> int | None:
        """Allocate ``nbytes`` (more than 0) in one piece and return its start; None if no piece is large enough."""
        # At most 256 regions are lent, so a search of the holes is cheaper than a structure that sorts them by size.
        for index, (start, end) in enumerate(self._holes):
            if end - start >= nbytes:
                self._holes[index : index + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        """Free a piece that :meth:`take` returned."""
        end = start + nbytes
        after = bisect.bisect(self._holes, (start, end))
        first, last = after, after
        if after > 0 and self._holes[after - 1][1] == start:
            first -= 1
            start = self._holes[first][0]
        if after < len(self._holes) and self._holes[after][0] == end:
            end = self._holes[after][1]
            last += 1
        self._holes[first:last] = [(start, end)]
