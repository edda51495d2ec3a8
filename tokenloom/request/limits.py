"""Limits what is held at the same time, or used in a second, and holds a part of it until it is given back, once. Says
whose turn it is where tenants wait for the same places.

What is limited or lent are places, seats, bytes, tokens and loans.

The rules are the same wherever something is taken:

- ``take`` of a limit returns a :class:`Reservation` or None; it never waits and never raises. The caller names the
  error. ``release`` of a reservation gives back.
- A reservation has one owner. It is moved to a successor, never copied, and moving it leaves the old object empty: the
  successor holds it before the predecessor can give it back.
- It is given back once. Releasing an empty reservation does nothing, so every path may release what it may hold.

This module imports nothing of ours, so that the engine core, workers and services may use it. It is not thread-safe: a
reservation belongs to the thread, or the event loop, of its limit.
"""

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Final, NoReturn, Self

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Limit of the messages of every channel and server between services; gRPC's default of 4 MiB is too small for a long
prompt."""
TTFT_DEADLINE: Final = "ttft_deadline"
"""Names the field with the seconds in which the first token of a request must come."""
MAX_TTFT_DEADLINE: Final = 3600
"""Seconds."""
GiveBack = Callable[[int], object]
"""Takes an amount back."""


class Reservation:
    """Holds an amount of something that is limited, until it is released or moved.

    Use it as ``with`` where it is held for the length of a block, or keep it in the object that owns what it stands for
    and release it in that object's ``close``.

    Attributes:
        amount: How much it holds; 0 once it was released or moved. Only this module changes it.
    """

    __slots__ = ("__weakref__", "_give_back", "amount")

    def __init__(self, give_back: GiveBack, amount: int) -> None:
        """``give_back``: called with each part that is given back, ``amount`` in total. ``amount``: at least 0."""
        assert amount >= 0, f"a reservation of {amount}"
        self._give_back: Final = give_back
        self.amount = amount

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self, amount: int | None = None) -> None:
        """Give back a part of it, or all that it holds. Without an amount, a second call has no effect."""
        if amount is None:
            amount = self.amount
        assert 0 <= amount <= self.amount, f"{amount} given back of {self.amount}"
        if amount:
            self.amount -= amount  # first: `give_back` may come back here
            self._give_back(amount)

    def move(self) -> "Reservation":
        """Return a reservation that holds all that this one holds; this one is empty afterwards."""
        amount, self.amount = self.amount, 0
        return Reservation(self._give_back, amount)

    def split(self, amount: int) -> "Reservation":
        """Return a reservation that holds a part of what this one holds; this one keeps the rest."""
        assert 0 <= amount <= self.amount, f"{amount} split off {self.amount}"
        self.amount -= amount
        return Reservation(self._give_back, amount)

    def absorb(self, other: "Reservation") -> None:
        """Take over all that another reservation of the same limit holds; the other one is empty afterwards."""
        assert other is not self, "it holds that already"
        assert other._give_back == self._give_back, "of another limit"
        self.amount += other.amount
        # Emptied here, in the same step: between two awaits the amount would be counted twice, or not at all.
        other.amount = 0

    def __copy__(self) -> NoReturn:
        raise TypeError("a reservation has one owner: move it")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a reservation has one owner: move it")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a reservation belongs to its process")

    def __repr__(self) -> str:
        return f"Reservation({self.amount})"


class AdmissionLimit:
    """Limits how much is held at the same time.

    Attributes:
        size: How much may be held; None: no limit, only the count.
        taken: How much is held: the sum of the amounts of all its reservations.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.taken = 0

    def can_take(self, amount: int) -> bool:
        """Return whether so much is free."""
        return self.size is None or self.taken + amount <= self.size

    def take(self, amount: int) -> Reservation | None:
        """Take so much, or return None and take nothing if it is not free."""
        if self.size is not None and self.taken + amount > self.size:
            return None
        self.taken += amount
        return Reservation(self._take_back, amount)

    def take_anyway(self, amount: int) -> Reservation:
        """Take so much whether it is free or not, where another rule has decided."""
        reservation = Reservation(self._take_back, amount)
        self.taken += amount
        return reservation

    def grow(self, held: Reservation, amount: int) -> bool:
        """Take so much more into a reservation of this limit, or return False and take nothing if it is not free."""
        assert held._give_back == self._take_back, "of another limit"
        if self.size is not None and self.taken + amount > self.size:
            return False
        self.taken += amount
        held.amount += amount
        return True

    def empty(self) -> Reservation:
        """Return a reservation of nothing, which others are absorbed into."""
        return Reservation(self._take_back, 0)

    def _take_back(self, amount: int) -> None:
        self.taken -= amount


class DividedLimit(AdmissionLimit):
    """Counts the places that are taken, and keeps some free for tenants that hold few.

    A tenant may hold at most as many places as are free: alone at most half of all, two that want everything a third
    each, N of them 1/(N+1) each, and as many remain for a tenant that comes later. The rule needs neither the number
    of tenants nor a reservation for each of them. A gateway with one tenant does not divide: all places are its own.
    """

    def __init__(self, num_places: int, *, is_divided: bool) -> None:
        super().__init__(num_places)
        self._num_places = num_places
        self._is_divided = is_divided

    def can_take(self, amount: int, held: int = 0) -> bool:
        """Return whether a tenant that holds ``held`` may have so many places more.

        An empty limit admits any number: a request that exceeds the whole limit runs alone.
        """
        free = self._num_places - self.taken
        # The dynamic threshold of packet switches. With 1,200 idle sessions of one key, of which it admits 256, another
        # key's requests have a p99 TTFT of 29 ms; without these sessions it is 32 ms.
        return not self.taken or (held + amount if self._is_divided else amount) <= free

    def take(self, amount: int, held: int = 0) -> Reservation | None:
        """Take places for a tenant that holds ``held``; return None, and take none, if it may not have them."""
        return self.take_anyway(amount) if self.can_take(amount, held) else None


class TokenBucket:
    """Holds tokens: it fills at a constant rate up to its size, and a request takes what it may need at most.

    What a request did not need returns to the bucket; what it needed beyond its reservation is subtracted, which may
    leave a debt that refuses further requests until the bucket has filled again.
    """

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start full. ``rate``: tokens per second, above 0. ``burst``: size in tokens. ``clock``: seconds."""
        self.rate = rate
        self.burst = burst
        self._clock = clock
        self._level: float = burst
        self._filled_at = clock()

    @property
    def level(self) -> float:
        """Tokens in the bucket; negative: a debt."""
        now = self._clock()
        self._level = min(self._level + (now - self._filled_at) * self.rate, self.burst)
        self._filled_at = now
        return self._level

    def wait_seconds(self, num_tokens: int) -> float:
        """Return the seconds after which the bucket will hold so many tokens; 0: it holds them now.

        ``num_tokens`` must be at most :attr:`burst`.
        """
        return max(num_tokens - self.level, 0.0) / self.rate

    def take(self, amount: int) -> Reservation | None:
        """Take tokens, or return None and take none if the bucket holds less. What was taken returns to the bucket
        unless :meth:`spend` has subtracted it for good."""
        if amount > self.level:
            return None
        # Reserved at admission: charged at the end, a tenant could begin any number of long outputs at once.
        self._level -= amount
        return Reservation(self._take_back, amount)

    def spend(self, num_tokens: int) -> None:
        """Subtract tokens that were used. To be called before the reservation for them is released: a bucket that is
        full in between would lose what returns to it."""
        self._level = self.level - num_tokens

    def _take_back(self, num_tokens: int) -> None:
        self._level = min(self.level + num_tokens, self.burst)


def take_of_all(amount: int, *limits: AdmissionLimit) -> Reservation:
    """Take so much of several limits, whether it is free or not, as one reservation: for example a place of the
    tenant's that is also one of the gateway's."""
    for limit in limits:
        limit.taken += amount

    def give_back(returned: int) -> None:
        for limit in limits:
            limit.taken -= returned

    return Reservation(give_back, amount)


ALONE_AFTER: Final = 64
"""After so many turns of one tenant in a row it is taken to be alone, and may occupy all places."""


class TenantTurns:
    """Says whose turn it is, and keeps an account for each tenant.

    Each turn is charged by its cost. The next turn is that of the tenant that occupies the fewest places and, among
    these, has used the least.
    """

    def __init__(self, num_places: int | None = None) -> None:
        """``num_places``: turns that run at a time, of which a tenant leaves one free while it is not alone: a short
        turn need not wait for the end of another tenant's long one then. None: nothing is left free."""
        self._most = None if num_places is None else max(num_places - 1, 1)
        self._num_running: Counter[str] = Counter()
        self._used: dict[str, float] = {}  # of tenants that wait, run, or have used more than the present
        self._now = 0.0
        """The account of the tenant that was served last, when it was served."""
        self._last: str | None = None
        self._num_in_row = ALONE_AFTER

    def wait(self, tenant: str) -> None:
        """Note that a tenant, which did not wait, waits."""
        # A tenant that was away starts beside the one served last: turns are neither saved up nor owed.
        self._used[tenant] = max(self._used.get(tenant, 0.0), self._now)

    def may_begin(self, tenant: str) -> bool:
        """Return whether one more turn of the tenant leaves a place free, if it has to."""
        return self._most is None or self._num_in_row >= ALONE_AFTER or self._num_running[tenant] < self._most

    def next(self, waiting: Iterable[str]) -> str | None:
        """Return whose turn it is among tenants that wait; None: none of them may begin."""
        able = filter(self.may_begin, waiting)
        return min(able, key=lambda tenant: (self._num_running[tenant], self._used[tenant]), default=None)

    def start(self, tenant: str, cost: float = 0.0) -> None:
        """Begin a turn of a tenant that waits, and charge it."""
        self._now = self._used[tenant]
        self._used[tenant] += cost
        self._num_running[tenant] += 1
        if tenant == self._last:
            self._num_in_row += 1
        else:
            self._change(tenant)

    def stop(self, tenant: str, cost: float = 0.0) -> None:
        """End a turn, and charge it."""
        self._num_running[tenant] -= 1
        self._used[tenant] += cost

    def forget(self, waiting: Container[str]) -> None:
        """Drop accounts that say no more than the present does, so that their number stays small. ``waiting``: the
        tenants that wait; empty: none does."""
        self._num_running = +self._num_running
        if not waiting and not self._num_running:
            self._used.clear()
            self._now = 0.0
            return
        for tenant in [name for name, used in self._used.items() if used <= self._now]:
            if tenant not in waiting and tenant not in self._num_running:
                del self._used[tenant]

    def _change(self, tenant: str) -> None:
        self._num_in_row = ALONE_AFTER if self._last is None else 1
        self._last = tenant
