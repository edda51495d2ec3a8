"""Says how long a request may run, and how many engines may die with it. No I/O."""

from tokenloom.request import errors
from tokenloom.v1.output_processor_pb2 import Submit

from ..placement.last_snapshot import EngineKey

MAX_ENGINE_DEATHS = 2
"""Engines that may die while they run only this request. Then it ends, because the request itself may kill them."""
_GIVE_UP_SECONDS = 0.25
_GIVE_UP_SHARE = 0.25


class Lifetime:
    """Holds what bounds the attempts at one request; its samples share it.

    An engine that dies is counted only if it ran nothing but this request: requests that were merely computed together
    with one that kills engines are not blamed, and only their deadline ends them.

    Attributes:
        deadline: Time of the event loop; None: no limit.
        give_up_at: When the request no longer waits for an engine: shortly before its deadline, so that the error that
            says why arrives before the gateway's own timer ends the request. None: no limit.
        num_deaths: Engines that died while they ran only this request, earlier output processors' counts included.
    """

    def __init__(self, num_deaths: int = 0, timeout: float | None = None, now: float = 0.0) -> None:
        """``timeout``: seconds that the request has from ``now`` on."""
        self.deadline = self.give_up_at = None
        if timeout is not None:
            self.deadline = now + timeout
            self.give_up_at = self.deadline - min(_GIVE_UP_SECONDS, _GIVE_UP_SHARE * timeout)
        self.num_deaths = num_deaths
        self._dead: list[EngineKey] = []  # at most MAX_ENGINE_DEATHS

    @classmethod
    def of(cls, submit: Submit, now: float) -> "Lifetime":
        """Return the lifetime of a request that was submitted ``now`` (time of the event loop)."""
        timeout = submit.timeout.ToNanoseconds() / 1e9 if submit.HasField("timeout") else None
        return cls(submit.engine_deaths, timeout, now)

    def engine_died(self, key: EngineKey) -> bool:
        """Count an engine that died while it ran only this request. Returns False if another sample has reported it."""
        if key in self._dead or self.is_over:
            return False
        self._dead.append(key)
        self.num_deaths += 1
        return True

    @property
    def is_over(self) -> bool:
        """Whether no further engine may run the request."""
        return self.num_deaths >= MAX_ENGINE_DEATHS

    def verdict(self) -> errors.EngineKiller:
        """Return the error of a request that is over."""
        return errors.EngineKiller(
            f"The engine died {self.num_deaths} times while it ran only this request, so the request is not tried "
            "again. Report it to the operator before you send it again."
        )
