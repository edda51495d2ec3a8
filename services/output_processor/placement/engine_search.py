"""Decides for one sample whether, where and when it continues after an engine has failed it."""

import asyncio
from collections.abc import Callable
from functools import partial

from tokenloom.request import errors
from tokenloom.services.runtime.peers.retry_budget import Cause, RetryBudget, RetryDebt, cause_of
from tokenloom.v1.output_processor_pb2 import Submit

from .engine_link import EngineAttempt, EngineLink
from .last_snapshot import EngineKey

MIN_DELAY_SECONDS = 0.05
MAX_DELAY_SECONDS = 1.0
_MAX_EXCLUDED = 8
MAX_WRONG = 3
"""Attempts at one sample that may end because of wrong frames and bring it no further."""
MAX_ENGINE_DEATHS = 2
"""Engines that may die while they run only this request. Then it ends, because the request itself may kill them."""
UNFIT_SECONDS = 10.0
"""How long a request that engines of others cannot run waits for one of ours, where the mesh has had any: one that was
lost is back by then."""
_GIVE_UP_SECONDS = 0.25
_GIVE_UP_SHARE = 0.25


class Lifetime:
    """Holds what bounds the attempts at one request; its samples share it.

    An engine that dies is counted only if it ran nothing but this request: requests that were merely computed together
    with one that kills engines are not blamed, and only their deadline ends them. A connection that ends is no death
    yet: it may have been reset while its engine runs on, so the engine is asked before it is counted.

    Attributes:
        deadline: Time of the event loop; None: no limit.
        give_up_at: When the request no longer waits for an engine: shortly before its deadline, so that the error that
            says why arrives before the gateway's own timer ends the request. None: no limit.
        num_deaths: Engines that died while they ran only this request, earlier output processors' counts included.
    """

    def __init__(self, submit: Submit, now: float) -> None:
        """``now``: when the request was submitted, by the event loop."""
        self.deadline: float | None = None
        self.give_up_at: float | None = None
        if submit.HasField("timeout"):
            timeout = submit.timeout.ToNanoseconds() / 1e9
            self.deadline = now + timeout
            self.give_up_at = self.deadline - min(_GIVE_UP_SECONDS, _GIVE_UP_SHARE * timeout)
        self.num_deaths = submit.engine_deaths
        self._dead: list[EngineKey] = []  # at most MAX_ENGINE_DEATHS
        self._suspects: dict[EngineKey, asyncio.Event] = {}  # engines that are being asked; set when they have answered

    def engine_died(self, key: EngineKey) -> bool:
        """Count an engine that died while it ran only this request. Returns False if another sample has reported it."""
        if key in self._dead or self.num_deaths >= MAX_ENGINE_DEATHS:
            return False
        self._dead.append(key)
        self.num_deaths += 1
        return True

    def suspect(self, key: EngineKey) -> bool:
        """Note that an engine may have died, until :meth:`settle`. Returns False if another sample has noted it."""
        if key in self._dead or key in self._suspects:
            return False
        self._suspects[key] = asyncio.Event()
        return True

    def settle(self, key: EngineKey) -> None:
        """Note that it is known of an engine whether it died."""
        self._suspects.pop(key).set()

    async def settled(self) -> None:
        """Return when another engine may run the request, whatever becomes known of those that may have died. Raises
        ``EngineKiller`` when none may."""
        while self._suspects and self.num_deaths < MAX_ENGINE_DEATHS <= self.num_deaths + len(self._suspects):
            await next(iter(self._suspects.values())).wait()
        if (verdict := self.verdict()) is not None:
            raise verdict

    def verdict(self) -> errors.EngineKiller | None:
        """Return the error of a request that no further engine may run; None if it may continue."""
        if self.num_deaths < MAX_ENGINE_DEATHS:
            return None
        return errors.EngineKiller(
            f"The engine died {self.num_deaths} times while it ran only this request, so the request is not tried "
            "again. Report it to the operator before you send it again."
        )


def _is_gone(_: EngineLink, found: Callable[[bool], None]) -> None:
    found(False)


class EngineSearch:
    """Takes note of each attempt that an engine failed, and says which engines the next pick excludes and when it may
    be made.

    A sample that lost its engine is placed again at once, on another engine. If it gets nowhere (no engine takes it, or
    one engine after the other fails it before a token), each further round begins after a delay, which doubles up to
    :data:`MAX_DELAY_SECONDS`, or as soon as an engine begins to serve.

    Attributes:
        exclude: Engines that failed the sample. All of them may be asked again when no other engine takes it: an
            engine that was only cut off may be back, and one that was restarted has another epoch.
        is_admitted: Whether the sample has lost an engine or waited for one. It then waits for room too, instead of
            ending because all engines are full.
        overload: Why the sample ends if no other engine has room: an engine refused it because it is full.
        has_ended: Whether the sample needs no further engine; no death is reported any more.
        unfit: Why the sample ends if no other engine does what it needs; None: none has refused it for that.
    """

    def __init__(
        self,
        budget: RetryBudget,
        lifetime: Lifetime,
        num_samples: int = 1,
        is_shared: Callable[[EngineKey, int], bool] = lambda _, num_samples: False,
        on_engine_death: Callable[[], object] = lambda: None,
        check: Callable[[EngineLink, Callable[[bool], None]], object] = _is_gone,
        is_open: Callable[[EngineKey], bool] = lambda _: False,
    ) -> None:
        """Args:
        budget: Of this process.
        num_samples: Those of the request.
        is_shared: Says whether an engine ran more live requests than so many samples of one.
        on_engine_death: Called when it is known that an engine died while it ran only this request.
        check: Finds out whether the engine of a link that ended still runs, and says so to its second argument.
            Without it such an engine counts as dead.
        is_open: Says whether there is an open link to an engine.
        """
        self._debt = RetryDebt(budget)
        self._lifetime = lifetime
        self._num_samples = num_samples
        self._is_shared = is_shared
        self._on_engine_death = on_engine_death
        self._check = check
        self._is_open = is_open
        self._num_failures = 0  # in a row, without a token between them
        self._num_wrong = 0  # the same
        self.exclude: list[EngineKey] = []
        self.is_admitted = False
        self.overload: errors.TokenloomError | None = None
        self.has_ended = False
        self.unfit: errors.TokenloomError | None = None
        self._unfit_until = 0.0
        self._has_begun = False  # when an engine refused it that does not do what it needs
        self._unfit: list[EngineKey] = []

    @property
    def must_wait(self) -> bool:
        """Whether the sample failed on two engines in a row without a token, so that a third one may fail it too."""
        return self._num_failures > 1

    def lost(self, attempt: EngineAttempt, *, is_alone: bool) -> None:
        """Note that the engine of an attempt died, fell silent or hangs. ``is_alone``: as in ``AttemptOwner``.

        Requests of other output processors on that engine show in the coordinator's last snapshot. Without a sign of
        them, the request was alone.
        """
        if is_alone and not self._is_shared(attempt.link.key, self._num_samples):
            self._suspect(attempt.link)
        if attempt.was_wrong:
            self._num_wrong = 1 if attempt.has_output else self._num_wrong + 1
        # One whose step hangs answers at once, and may hang on.
        is_back = partial(self._is_open, attempt.link.key) if attempt.link.fell_silent else None
        cause = Cause.SILENT if attempt.link.may_compute else Cause.GONE
        self._failed(attempt.link.key, cause, attempt.has_output, is_back)

    def verdict(self) -> errors.TokenloomError | None:
        """Return the error of a sample that no further engine may run; None if it may continue."""
        if self._num_wrong < MAX_WRONG:
            return self._lifetime.verdict()
        return errors.Internal("The engines sent again and again, for this request, what no engine may send.")

    def refused(self, attempt: EngineAttempt, error: errors.TokenloomError, *, has_begun: bool) -> bool:
        """Note the error with which an engine ended an attempt. Returns whether another engine may answer differently:
        the engine drains, is full, has loaded other weights, or its core died. Of what it cannot say more of, only a
        request goes on that has no token yet (``has_begun``: it has some, or KV)."""
        key, cause = attempt.link.key, cause_of(error)
        if cause is Cause.GONE:
            if isinstance(error, errors.EngineDied):
                self._blame(key)
            self._failed(key, cause, attempt.has_output)
        elif cause is Cause.FULL and self.is_admitted:
            self._failed(key, cause, had_output=False)
        elif cause is Cause.FULL:
            # A sample that was not admitted ends with the error unless another engine has room.
            self._debt.failed(cause)
            self._exclude(key)
            self.overload = error
        elif cause is Cause.UNFIT:
            self._has_begun = has_begun
            if self.unfit is None:
                self._unfit_until = asyncio.get_running_loop().time() + UNFIT_SECONDS
            self.unfit = error
            self._unfit = [*(each for each in self._unfit if each != key), key][-_MAX_EXCLUDED:]
            self._exclude(key)
        elif cause is Cause.SILENT and not has_begun:
            self._failed(key, cause, had_output=False)
            return True
        return cause in (Cause.GONE, Cause.FULL, Cause.UNFIT)

    def next_round(self, *, others_served: bool, began_at_theirs: bool = False) -> None:
        """Let engines that failed the sample be asked again, apart from those that do not do what it needs.

        ``others_served``: whether the mesh has had an engine of ours, as far as this process has seen.
        ``began_at_theirs``: whether a server of others has computed its tokens so far. Raises what refused the sample
        if it need not wait for another engine: one refused it because it is full, or none has come for
        :data:`UNFIT_SECONDS` that does what it needs. One that has begun waits like any other, unless it began where
        there is nothing else.
        """
        if self.overload is not None:
            raise self.overload
        may_wait = others_served and asyncio.get_running_loop().time() < self._unfit_until
        may_wait |= self._has_begun and (others_served or not began_at_theirs)
        if self.unfit is not None and not may_wait:
            raise self.unfit
        self.exclude = list(self._unfit)

    async def wait_for_budget(self, engine_came: asyncio.Event) -> None:
        """Return when the budget of retries permits the next attempt, and it is known that the request has not killed
        too many engines.

        Raises ``EngineKiller`` if it has, and what refused a sample that was not admitted, instead of letting it wait;
        otherwise as :meth:`pause`.
        """
        while not self._debt.pay():
            if self.overload is not None:
                raise self.overload
            await self.pause(engine_came)
        await self._lifetime.settled()

    async def pause(self, engine_came: asyncio.Event, cause: errors.TokenloomError | None = None) -> None:
        """Wait for ``engine_came``, which is set when another engine serves, or until the next round is due.

        Raises ``Unavailable`` when no time is left, with the message of ``cause``.
        """
        # 193 of 209 lost requests had been lost because nothing waited for an engine that was back within seconds.
        delay = min(MIN_DELAY_SECONDS * 2 ** min(max(self._num_failures - 1, 0), 10), MAX_DELAY_SECONDS)
        if (give_up_at := self._lifetime.give_up_at) is not None:
            left = give_up_at - asyncio.get_running_loop().time()
            if left <= 0:
                reason = f" The last answer was: {cause.message}" if cause is not None else ""
                raise errors.Unavailable(f"No engine could take the request before its deadline.{reason}")
            delay = min(delay, left)
        self._num_failures += 1
        self.is_admitted = True
        try:
            async with asyncio.timeout(delay):
                await engine_came.wait()
        except TimeoutError:
            pass

    def _exclude(self, key: EngineKey) -> None:
        self.exclude = [*(each for each in self.exclude if each != key), key][-_MAX_EXCLUDED:]

    def _failed(
        self, key: EngineKey, cause: Cause, had_output: bool, is_back: Callable[[], bool] | None = None
    ) -> None:
        """Note that an engine does not continue the sample. ``had_output``: after it had sent tokens. ``is_back``: as
        of :meth:`RetryDebt.failed`."""
        self._debt.failed(cause, made_progress=had_output, is_back=is_back)
        self._exclude(key)
        self._num_failures = 1 if had_output else self._num_failures + 1
        self.is_admitted = True
        self.overload = None

    def _suspect(self, link: EngineLink) -> None:
        """Blame the request for the end of a connection, if the engine turns out to be gone."""

        def found(is_alive: bool) -> None:
            self._lifetime.settle(link.key)
            if not is_alive:
                self._blame(link.key)

        # The next attempt does not wait for the answer, unless one more death would be too many: the address of a host
        # that is gone may not answer for seconds.
        if self._lifetime.suspect(link.key):
            self._check(link, found)

    def _blame(self, key: EngineKey) -> None:
        # What becomes known of an engine after the end is not reported: the slot may be another request's by then.
        if self._lifetime.engine_died(key) and not self.has_ended:
            self._on_engine_death()
