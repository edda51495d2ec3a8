"""Which parts of a stretch of memory are free."""

import bisect


class FreeSpace:
    """First fit: what is low is used again first, so that few pages are ever touched."""

    def __init__(self, size: int) -> None:
        self._holes: list[tuple[int, int]] = [(0, size)] if size else []  # [start, end), sorted, none touches another

    @property
    def nbytes(self) -> int:
        """Free in all; not in one piece."""
        return sum(end - start for start, end in self._holes)

    def take(self, nbytes: int) -> int | None:
        """Where ``nbytes`` (more than 0) in one piece begin; None: there is no such piece."""
        for index, (start, end) in enumerate(self._holes):
            if end - start >= nbytes:
                self._holes[index : index + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        """What :meth:`take` gave."""
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
