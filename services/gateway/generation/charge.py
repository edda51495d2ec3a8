"""Counts what a tenant owes for one request: each of its tokens once, whichever calls and attempts brought it."""

from collections.abc import Callable, Sequence
from typing import Final

from ..metrics.usage_counts import Used
from ..records.request_ids import ResumeToken

KEPT_SECONDS: Final = 60.0
"""For so long output processors keep an answer that has ended (``--keep-lost-requests``). A later call with the same
key begins a new request, which is charged as one."""
MAX_CHARGES: Final = 65_536
"""Complete requests whose charge is remembered: as many as end in that time at 1,000 requests per second. One takes
about 300 bytes."""


class Charge:
    """Knows up to which position the outputs of a request were counted.

    Every call that resumes or repeats a request gets its output again from the beginning, so the highest position of
    all of them is what was computed.

    Attributes:
        num_calls: Calls of the request that have not ended.
    """

    __slots__ = ("_counted", "_elsewhere", "_has_prompt", "_num_cached", "_prompt_is_elsewhere", "num_calls")

    def __init__(self, elsewhere: Sequence[int] = (), *, has_prompt: bool = False) -> None:
        """``elsewhere``: tokens of each output that were counted elsewhere. ``has_prompt``: so was the prompt."""
        self.num_calls = 0
        self._elsewhere = list(elsewhere)
        self._counted = list(elsewhere)
        self._has_prompt = self._prompt_is_elsewhere = has_prompt
        self._num_cached = 0

    @classmethod
    def of(cls, token: ResumeToken) -> "Charge":
        """Return the charge of a request for its first call here. One that is resumed was begun through another
        gateway, which has counted the prompt and what the client has of the output."""
        return cls(token.num_delivered, has_prompt=token.resumes)

    def trust(self, token: ResumeToken) -> None:
        """Believe of what was counted elsewhere only as much as the client of every call says it has: a client that
        names a position it never had must not get what is before it for nothing."""
        for index, elsewhere in enumerate(self._elsewhere):
            has = token.num_delivered[index] if index < len(token.num_delivered) else 0
            if has < elsewhere:
                self._counted[index] -= elsewhere - has
                self._elsewhere[index] = has
        if self._prompt_is_elsewhere and not token.resumes:
            self._has_prompt = self._prompt_is_elsewhere = False

    def add(self, num_prompt: int, num_cached: int, positions: Sequence[int]) -> Used:
        """Count what a call has got, and return the part of it that was not counted before. ``positions``: tokens of
        each output."""
        counted = self._counted
        counted += [0] * (len(positions) - len(counted))
        num_new = 0
        for index, position in enumerate(positions):
            # By position, and not by what each call was sent: with three resumptions an answer of 66 tokens was charged
            # as 181.
            if position > counted[index]:
                num_new += position - counted[index]
                counted[index] = position
        is_new, self._has_prompt = not self._has_prompt, True
        num_newly_cached = max(num_cached - self._num_cached, 0)  # known at the end of an output only
        self._num_cached += num_newly_cached
        return Used(int(is_new), num_prompt if is_new else 0, num_newly_cached, num_new)


class Charges:
    """Remembers the charges of requests that can be resumed, or repeated by a key, as long as a further call gets the
    same output: while calls run, and for a while after a complete answer."""

    def __init__(self, clock: Callable[[], float], most: int = MAX_CHARGES) -> None:
        """``clock``: seconds. ``most``: complete requests that are remembered; the one that was complete first is
        forgotten first."""
        self._clock = clock
        self._most = most
        self._by_id: dict[tuple[str, str], Charge] = {}  # bounded by what is admitted, and by `most`
        self._complete: dict[tuple[str, str], float] = {}  # those that can be repeated, with the end of that, ascending

    def of(self, tenant: str, request_id: str, token: ResumeToken) -> Charge:
        """Return the charge of a request for a call, which must :meth:`leave` at its end.

        A request that is resumed, and that this gateway does not know, was begun through another one, which has counted
        the prompt and what the client has of the output.
        """
        self._forget_old()
        key = tenant, request_id
        if (charge := self._by_id.get(key)) is None:
            charge = self._by_id[key] = Charge.of(token)
        charge.trust(token)
        charge.num_calls += 1
        return charge

    def leave(self, tenant: str, request_id: str, charge: Charge, *, is_complete: bool) -> None:
        """End a call. ``is_complete``: it got the whole answer, which output processors keep for a while. Any other one
        they have forgotten if no other call has it: it is computed again for who asks for it."""
        key = tenant, request_id
        if self._by_id.get(key) is not charge:
            return
        charge.num_calls -= 1
        if is_complete:
            self._complete.setdefault(key, self._clock() + KEPT_SECONDS)  # a repeat does not prolong it
            self._forget_old()
        # Kept no longer than output processors keep the answer. While it stayed until 65,536 others displaced it, a
        # tenant that used one key again and again paid for its first answer only.
        elif not charge.num_calls and key not in self._complete:
            del self._by_id[key]

    def forget(self, tenant: str, request_id: str) -> None:
        """Forget a request that its client has cancelled. A call with its key begins it anew."""
        self._by_id.pop((tenant, request_id), None)
        self._complete.pop((tenant, request_id), None)

    def _forget_old(self) -> None:
        """Forget the requests that cannot be repeated any more, and the oldest ones beyond the limit."""
        now = self._clock()
        while self._complete:
            oldest = next(iter(self._complete))
            if self._complete[oldest] > now and len(self._complete) <= self._most:
                return
            del self._complete[oldest]
            del self._by_id[oldest]
