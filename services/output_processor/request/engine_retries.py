"""Decides whether a sample that an engine failed continues on another one. No I/O."""

from collections.abc import Callable

from tokenloom.request import errors
from tokenloom.services.runtime.peers.retry_budget import Cause, cause_of
from tokenloom.v1.output_processor_pb2 import Submit

from ..placement.engine_link import EngineAttempt
from ..placement.engine_search import EngineSearch
from ..placement.placement import Placer
from .lifetime import Lifetime


class EngineRetries:
    """Takes note of each attempt that an engine failed.

    Attributes:
        search: What the next placement has to know.
    """

    def __init__(
        self, submit: Submit, lifetime: Lifetime, on_engine_death: Callable[[], object], placer: Placer
    ) -> None:
        """``on_engine_death``: called when an engine died while it ran only this request."""
        self._num_samples = submit.num_samples or 1
        self._lifetime = lifetime
        self._on_engine_death = on_engine_death
        self._placer = placer
        self.search = EngineSearch(placer.budget, lifetime.give_up_at)

    def lost(self, attempt: EngineAttempt, *, is_alone: bool) -> None:
        """Note that the engine of an attempt died, fell silent or hangs. ``is_alone``: as in ``AttemptOwner``.

        Requests of other output processors on that engine show in the coordinator's last snapshot. Without a sign of
        them, the request was alone.
        """
        if is_alone and not self._placer.is_shared(attempt.link.key, self._num_samples):
            self._blame(attempt)
        cause = Cause.SILENT if attempt.link.may_compute else Cause.GONE
        self.search.failed(attempt.link.key, cause, had_output=attempt.has_output)

    def refused(self, attempt: EngineAttempt, error: errors.TokenloomError) -> bool:
        """Note the error with which an engine ended an attempt. Returns whether another engine may answer differently:
        the engine drains, is full or its core died."""
        key = attempt.link.key
        match cause_of(error):
            case Cause.GONE as cause:
                if isinstance(error, errors.EngineDied):
                    self._blame(attempt)
                self.search.failed(key, cause, had_output=attempt.has_output)
                return True
            case Cause.FULL:
                self.search.refused(key, error)
                return True
        return False

    def verdict(self) -> errors.TokenloomError | None:
        """Return the error of a request that no further engine may run; None if it may continue."""
        return self._lifetime.verdict() if self._lifetime.is_over else None

    def _blame(self, attempt: EngineAttempt) -> None:
        if self._lifetime.engine_died(attempt.link.key):
            self._on_engine_death()
