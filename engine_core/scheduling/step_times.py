"""Estimates how long a step of so many tokens may take before it counts as hung."""

SHORTEST_SECONDS = 3.0
"""A shorter step is never hung."""
NEW_SIZE_SECONDS = 10.0
"""The first step of a size may take this long, because code and memory for it may have to be prepared."""
FIRST_SECONDS = 60.0
"""The first step of all may take this long."""
# No fixed limit works: a hung core was noticed after 60 s without a step, and shorter ones would end engines whose long
# prefills or first steps take longer. The two notes of a step cost 1.6 µs.
MULTIPLE = 10.0
"""A step is hung when it takes this many times as long as steps of its size usually take."""
_WEIGHT = 1 / 8
_LARGEST_RATIO = 2.0  # a longer step moves the usual time no further, so that one outlier changes little


class StepTimes:
    """Learns the usual time of steps by their size: the number of their tokens, in powers of two."""

    def __init__(self, warm_up_seconds: float = 0.0) -> None:
        """``warm_up_seconds``: how long the warm-up took, which computed the largest step."""
        self._warm_up_seconds = warm_up_seconds
        self._usual: dict[int, float] = {}  # seconds by size; as many as a number of tokens has bits

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that has ended."""
        size = num_tokens.bit_length()
        usual = self._usual.get(size)
        if usual is None:
            self._usual[size] = seconds
        else:
            most = _LARGEST_RATIO * usual
            self._usual[size] = usual + _WEIGHT * ((seconds if seconds < most else most) - usual)

    def limit(self, num_tokens: int) -> float:
        """Return how many seconds a step of so many tokens may take."""
        size = num_tokens.bit_length()
        if (usual := self._usual.get(size)) is not None:
            limit = MULTIPLE * usual
            return limit if limit > SHORTEST_SECONDS else SHORTEST_SECONDS  # the step of every request gets here
        if not self._usual:
            return max(FIRST_SECONDS, MULTIPLE * self._warm_up_seconds)
        return max(NEW_SIZE_SECONDS, MULTIPLE * self._most(size))

    def _most(self, size: int) -> float:
        """Return how long the first step of a size takes at most: as long as one of the next larger size that is known,
        or as the whole warm-up, or as the largest known one in proportion to the number of tokens."""
        larger = [known for known in self._usual if known > size]
        if larger:
            return self._usual[min(larger)]
        largest = max(self._usual)
        if self._warm_up_seconds:
            return max(self._warm_up_seconds, self._usual[largest])
        return self._usual[largest] * 2.0 ** (size - largest)
