"""Measures how a coordinator answers picks that are offered at a rate, through gRPC."""

import asyncio
from dataclasses import dataclass

from tokenloom.request.prefix_schedule import MAX_HASHES
from tokenloom.services.runtime.telemetry.fast_metrics import quantile

from .child import Child
from .coordinator_process import Coordinator

RATES = ((10_000, 0), (5_000, MAX_HASHES))
"""Picks per second, and the block hashes of each."""
CAPACITY_SHARE = 0.6
"""Share of what is answered at most at which latencies are measured once more."""
_WARM_UP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class StreamResult:
    """Describes picks of a rate through gRPC. Latencies count from the moment at which a pick is due, and include the
    process that asks.

    Attributes:
        answered_per_second: Until all that were asked were answered.
        here_p99_milliseconds: From reading a message with picks until its last answer was sent, in the coordinator.
        wait_share: For so much of the time the thread with the event loop waited for a core.
        cores: What the coordinator used, its reports and snapshots included.
        loop_cores: The part of it in the thread with the event loop, which cannot use more than one.
        microseconds_a_pick: What all threads of the coordinator used, for each pick that was answered.
        most_per_second: Picks that are answered if the streams ask for more as soon as they have answers.
        share_p99_milliseconds: As ``p99_milliseconds``, of :data:`CAPACITY_SHARE` of these.
        share_here_p99_milliseconds: As ``here_p99_milliseconds``, of the same.
    """

    hashes: int
    asked_per_second: float
    answered_per_second: float
    p50_milliseconds: float
    p99_milliseconds: float
    here_p99_milliseconds: float
    wait_share: float
    cores: float
    loop_cores: float
    microseconds_a_pick: float
    most_per_second: float
    share_p99_milliseconds: float
    share_here_p99_milliseconds: float


async def measure(pickers: Child, coordinator: Coordinator, rate: int, num_hashes: int, seconds: float) -> StreamResult:
    """Offer so many picks per second, and then as many as are answered. ``pickers``: a process of that module."""

    async def ask(order: str, for_seconds: float, rate: int = rate) -> dict[str, float]:
        return await asyncio.to_thread(pickers.counts, f"{order} {rate} {num_hashes} {for_seconds}")

    async def offer(rate: int) -> tuple[dict[str, float], float]:
        before = await asyncio.to_thread(coordinator.pick_seconds)
        answered = await ask("offer", seconds, rate)
        within = await asyncio.to_thread(coordinator.pick_seconds)
        return answered, quantile({bound: count - before[bound] for bound, count in within.items()}, 0.99) or 0.0

    await ask("offer", _WARM_UP_SECONDS)
    wait, cpu, loop = coordinator.loop_wait_seconds(), coordinator.cpu_seconds(), coordinator.loop_seconds()
    answered, here_p99 = await offer(rate)
    cpu, loop = coordinator.cpu_seconds() - cpu, coordinator.loop_seconds() - loop
    wait = coordinator.loop_wait_seconds() - wait
    count, elapsed = answered["picks"], answered["seconds"]
    most = (await ask("flood", seconds))["picks_per_second"]
    of_share, share_here_p99 = await offer(int(CAPACITY_SHARE * most))
    return StreamResult(
        hashes=num_hashes,
        asked_per_second=rate,
        answered_per_second=count / elapsed,
        p50_milliseconds=answered["p50"] * 1e3,
        p99_milliseconds=answered["p99"] * 1e3,
        here_p99_milliseconds=here_p99 * 1e3,
        wait_share=wait / elapsed,
        cores=cpu / elapsed,
        loop_cores=loop / elapsed,
        microseconds_a_pick=cpu / count * 1e6,
        most_per_second=most,
        share_p99_milliseconds=of_share["p99"] * 1e3,
        share_here_p99_milliseconds=share_here_p99 * 1e3,
    )
