"""Sums up what the serving engines can do and what they have to do, as the coordinator last reported it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from tokenloom.v1.coordinator_pb2 import EngineEntry
from tokenloom.v1.types_pb2 import EngineRole


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity and the load of all serving engines together.

    Attributes:
        seats: Requests that may run at the same time; 0: not known.
        prefill_tokens_per_second: Prompt tokens that leave the queues while only compute limits them; 0: not known.
        starts_per_second: Requests that leave the queues while they wait for seats; 0: not known.
        live: Requests that run or wait.
        waiting_tokens: Prompt tokens that are not computed yet.
    """

    seats: int = 0
    prefill_tokens_per_second: float = 0.0
    starts_per_second: float = 0.0
    live: int = 0
    waiting_tokens: int = 0

    @classmethod
    def of(cls, engines: Sequence[EngineEntry]) -> "Capacity":
        """Return the capacity of these engines. Engines that decode provide the seats, engines that prefill compute
        the prompts; if a role is missing, the engines of the other one do its work."""
        decoding = _of_roles(engines, EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_DECODE)
        prefilling = _of_roles(engines, EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL)
        return cls(
            seats=sum(entry.report.seats for entry in decoding),
            prefill_tokens_per_second=_total(prefilling, attrgetter("report.prefill_tokens_per_second")),
            starts_per_second=_total(decoding, attrgetter("report.starts_per_second")),
            live=sum(entry.report.running + entry.waiting for entry in engines),
            waiting_tokens=sum(entry.waiting_tokens for entry in prefilling),
        )

    def without_load(self) -> "Capacity":
        """Return the same capacity with nothing to do: the load is not known any more."""
        return replace(self, live=0, waiting_tokens=0)


def _of_roles(engines: Sequence[EngineEntry], *roles: EngineRole) -> Sequence[EngineEntry]:
    return [entry for entry in engines if entry.report.role in roles] or engines


def _total(engines: Iterable[EngineEntry], rate_of: Callable[[EngineEntry], float]) -> float:
    """Return the sum of a rate. An engine whose rate is not known counts as the mean of the others."""
    rates = list(map(rate_of, engines))
    # An engine that just joined has measured nothing. As zero it would make the mesh look slower the more engines it
    # gets.
    known = [rate for rate in rates if rate > 0]
    return sum(known) * len(rates) / len(known) if known else 0.0
