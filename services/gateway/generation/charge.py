"""Counts what a tenant owes for one request: each of its tokens once, whichever calls and attempts brought it."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from ..usage_counts import Used
from .claim import Claim

MAX_CHARGES: Final = 65_536
"""Requests whose charge is remembered: as many as begin in the time for which output processors keep an answer that
has ended, at 1,000 requests per second. One takes about 300 bytes."""


class Charge:
    """Knows up to which position the outputs of a request were counted.

    Every call that resumes or repeats a request gets its output again from the beginning, so the highest position of
    all of them is what was computed.
    """

    __slots__ = ("_has_prompt", "_num_cached", "_positions")

    def __init__(self, positions: Sequence[int] = (), *, has_prompt: bool = False) -> None:
        """``positions``: tokens of each output that were counted elsewhere. ``has_prompt``: so was the prompt."""
        self._positions = list(positions)
        self._has_prompt = has_prompt
        self._num_cached = 0

    def add(self, num_prompt: int, num_cached: int, positions: Sequence[int]) -> Used:
        """Count what a call has got, and return the part of it that was not counted before. ``positions``: tokens of
        each output."""
        counted = self._positions
        counted += [0] * (len(positions) - len(counted))
        num_new = 0
        for index, position in enumerate(positions):
            if position > counted[index]:
                num_new += position - counted[index]
                counted[index] = position
        is_new, self._has_prompt = not self._has_prompt, True
        num_newly_cached = max(num_cached - self._num_cached, 0)  # known at the end of an output only
        self._num_cached += num_newly_cached
        return Used(int(is_new), num_prompt if is_new else 0, num_newly_cached, num_new)


class Charges:
    """Remembers the charges of requests that can be resumed, or repeated by a key, beyond the end of their calls."""

    def __init__(self, most: int = MAX_CHARGES) -> None:
        """``most``: how many are remembered; the one that was asked for longest ago is forgotten first."""
        self._most = most
        self._by_id: OrderedDict[tuple[str, str], Charge] = OrderedDict()

    def of(self, tenant: str, request_id: str, claim: Claim) -> Charge:
        """Return the charge of a request.

        A request that is resumed, and that this gateway does not know, was begun through another one, which has counted
        the prompt and what the client has of the output.
        """
        key = tenant, request_id
        if (charge := self._by_id.get(key)) is not None:
            self._by_id.move_to_end(key)
            return charge
        charge = self._by_id[key] = Charge(claim.num_delivered, has_prompt=claim.resumes)
        if len(self._by_id) > self._most:
            self._by_id.popitem(last=False)
        return charge
