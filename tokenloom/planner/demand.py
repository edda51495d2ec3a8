"""Computes how many engines a load needs at this moment, from what the engines report: it learns how the duration of a
step grows with the batch. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineState
from tokenloom.v1.types_pb2 import EngineRole


class PlannedRole(StrEnum):
    """Which stages of requests an engine takes."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


ROLES = {
    EngineRole.ENGINE_ROLE_BOTH: PlannedRole.BOTH,
    EngineRole.ENGINE_ROLE_PREFILL: PlannedRole.PREFILL,
    EngineRole.ENGINE_ROLE_DECODE: PlannedRole.DECODE,
}


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Describes one serving engine.

    Attributes:
        name: Its id; of a Kubernetes pod, the pod's name.
        address: Of its services.
        model: The model that it serves: engines of different models are planned separately.
        waiting: Requests that wait, those on their way included.
        running: Requests in its batch.
        waiting_tokens: Prompt tokens of waiting requests that are not computed yet.
        kv_usage: Share of its KV blocks that requests hold, in [0, 1].
        seats: Requests that may run at the same time.
        step_seconds: Mean duration of a step, which is the time between two tokens; 0: not known.
        step_requests: Mean requests in the batch of those steps.
        starts_per_second: Requests that begin per second while others wait for a place in the batch; 0: not known.
        prompt_tokens_per_second: Prompt tokens that it prefilled lately, per second of all time.
        prefill_tokens_per_second: What it prefills per second while prompts wait; 0: not known.
    """

    name: str
    role: PlannedRole
    address: str = ""
    model: str = ""
    waiting: int = 0
    running: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0
    seats: int = 0
    step_seconds: float = 0.0
    step_requests: float = 0.0
    starts_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    prefill_tokens_per_second: float = 0.0

    @classmethod
    def of(cls, entry: EngineEntry) -> "EngineLoad | None":
        """Return what a snapshot says of an engine; None unless it serves."""
        report = entry.report
        if report.state != EngineState.ENGINE_STATE_SERVING:
            return None
        return cls(
            name=entry.identity.engine_id,
            role=ROLES.get(report.role, PlannedRole.BOTH),
            address=entry.identity.address,
            model=entry.identity.fingerprint.model,
            waiting=entry.waiting,
            running=report.running,
            waiting_tokens=entry.waiting_tokens,
            kv_usage=report.kv_usage,
            seats=report.seats,
            step_seconds=report.step_seconds,
            step_requests=report.step_requests,
            starts_per_second=report.starts_per_second,
            prompt_tokens_per_second=report.prompt_tokens_per_second,
            prefill_tokens_per_second=report.prefill_tokens_per_second,
        )


_KEPT: Final = 0.98
"""Weight of the former observations at each new one: the last fifty or so count."""
_LEAST_SPREAD: Final = 0.1
"""Standard deviation of the batch sizes, as a share of their mean, from which a line is fitted."""


class StepTimeModel:
    """Fits ``seconds = base + slope * running`` to the observed steps by least squares; old ones fade.

    Where the batches were all of about one size, the slope cannot be seen and stays as it was. Before the first one is
    seen, the step is taken as proportional to the batch, which promises too little for an engine that keeps its goal.
    """

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._slope = 0.0  # 0: not seen yet

    def observe(self, running: float, seconds: float) -> None:
        """Take the mean step of an engine with a batch of ``running`` requests, more than none."""
        self._n = self._n * _KEPT + 1
        self._x = self._x * _KEPT + running
        self._y = self._y * _KEPT + seconds
        self._xx = self._xx * _KEPT + running * running
        self._xy = self._xy * _KEPT + running * seconds
        x, y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - x * x
        if variance > (_LEAST_SPREAD * x) ** 2:
            self._slope = max((self._xy / self._n - x * y) / variance, 0.0)

    def largest_batch(self, seconds: float) -> float:
        """Return the requests of the largest batch whose step takes at most ``seconds``; 0: nothing was observed."""
        if not self._n:
            return 0.0
        base, slope = self._line()
        return max((seconds - base) / slope, 1.0)

    def step_seconds(self, running: float) -> float:
        """Return how long the step of such a batch takes; 0: nothing was observed."""
        if not self._n:
            return 0.0
        base, slope = self._line()
        return base + slope * running

    def _line(self) -> tuple[float, float]:
        x, y = self._x / self._n, self._y / self._n
        slope = min(self._slope or y / x, y / x)  # a larger one would promise steps that take no time
        return y - slope * x, slope


DRAIN_SECONDS: Final = 30.0
"""A backlog is to be worked off within so long: as long as it lasts, every request is late. Engines that were asked for
are not counted before they serve, so a shorter time would ask for far more of them than it saves requests."""
FULL_KV: Final = 0.9
"""Share of its KV blocks that an engine may hold before requests wait or are preempted."""


@dataclass(frozen=True, slots=True)
class Goals:
    """Holds what an operator asks for.

    Attributes:
        ttft_seconds: Time to the first token.
        itl_seconds: Time between two tokens.
        busy: Share of its capacity that an engine is planned to use; the rest absorbs what arrives in bursts.
    """

    ttft_seconds: float = 2.0
    itl_seconds: float = 0.05
    busy: float = 0.75


@dataclass(frozen=True, slots=True)
class Demand:
    """Says how many engines a load needs, in fractions of engines; 0: nothing is known yet."""

    prefill: float = 0.0
    decode: float = 0.0


def prefill_engines(engines: Sequence[EngineLoad], growth: float, goals: Goals) -> float:
    """Return how many engines must prefill.

    They must compute what arrives with time to spare; or, if that is more, all that they can must suffice for what
    arrives and for what waits longer than half the goal for the first token, within :data:`DRAIN_SECONDS`. An engine
    whose speed was never measured, because no prompt waited, can do at least what the busiest does.

    Args:
        engines: Those that prefill now.
        growth: Waiting prompt tokens that were added per second since the last look, less what was computed.
    """
    rates = [each.prefill_tokens_per_second for each in engines if each.prefill_tokens_per_second]
    busiest = max((each.prompt_tokens_per_second for each in engines), default=0.0)
    rate = max(sum(rates) / len(rates), busiest) if rates else busiest / goals.busy
    if not rate:
        return 0.0
    arriving = max(sum(each.prompt_tokens_per_second for each in engines) + growth, 0.0)
    waiting = sum(each.waiting_tokens for each in engines)
    late = max(waiting - rate * len(engines) * goals.ttft_seconds / 2, 0.0)
    # With 120 s instead of 30 for the backlog, 72.0 instead of 83.7 % of the requests after a simulated step of the
    # load kept to the goals.
    return max(arriving / goals.busy, arriving + late / DRAIN_SECONDS) / rate


def decode_engines(engines: Sequence[EngineLoad], growth: float, steps: StepTimeModel, goals: Goals) -> float:
    """Return how many engines must decode.

    The load is tokens per second, since the number of running requests grows with the step: at the goal, ``tokens per
    second * step`` requests run. They need places in batches that keep to the goal, and KV blocks. What waits for a
    place adds as much as it exceeds what begins, and is to begin within :data:`DRAIN_SECONDS`.

    Args:
        engines: Those that decode now.
        growth: Waiting requests that were added per second since the last look, less those that began.
        steps: How long a step of a batch takes.
    """
    seats = min((each.seats for each in engines if each.seats), default=0)
    batch = min(steps.largest_batch(goals.itl_seconds), seats)
    if not batch:
        return 0.0
    step = min(steps.step_seconds(batch), goals.itl_seconds)
    running, waiting = sum(each.running for each in engines), sum(each.waiting for each in engines)
    stepping = [each for each in engines if each.running and each.step_seconds]
    tokens_per_second = sum(each.step_requests / each.step_seconds for each in stepping)
    at_goal = tokens_per_second * step
    if starts := sum(each.starts_per_second for each in engines):
        arriving = max(1 + growth / starts, 0.0)  # as a share of what begins
        at_goal *= max(arriving, (arriving + waiting / starts / DRAIN_SECONDS) * goals.busy)
    kv_each = sum(each.kv_usage for each in engines) / running if running else 0.0
    return max(at_goal / batch, at_goal * kv_each / FULL_KV) / goals.busy


def by_role(engines: Sequence[EngineLoad], role: PlannedRole) -> list[EngineLoad]:
    """Return the engines that take the legs of ``role``. An engine of both roles counts as one that decodes where
    others only prefill or decode, as requests are placed."""
    if role == PlannedRole.PREFILL:
        return [each for each in engines if each.role == PlannedRole.PREFILL]
    return [each for each in engines if each.role != PlannedRole.PREFILL]
