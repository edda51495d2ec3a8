"""``python -m tests.soak.endurance --seconds 7200``: the mix of requests of ``tokenloom chaos`` without any fault.

No request may fail or differ from its first answer, and no part may hold more at the end than at the beginning:
resident memory, descriptors and threads of every process are read every ten seconds. The first fifth warms caches and
pools up; of the rest, the last quarter is compared with the first one.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from benchmarks.chaos.campaign.layout_run import LayoutRun
from benchmarks.chaos.campaign.layouts import Target, layouts_of, run_layout
from benchmarks.chaos.campaign.options import Campaign, ChaosOptions
from benchmarks.chaos.clients.load import Load
from benchmarks.chaos.clients.record import Record
from tokenloom.bench.report import machine
from tokenloom.supervisor.output import Tail

EVERY_SECONDS = 10.0
WARM_SHARE = 0.2
MOST_MIB = 4.0
"""How much more memory a part may have: freed memory is returned late, and in pieces."""
MOST_MIB_AN_HOUR = 24.0
"""The same of long runs, beyond what a short one may have."""
MOST_DESCRIPTORS = 4
"""Connections of clients that are open at the moment of a sample."""
MOST_THREADS = 1
"""A pool that had no use yet for its last thread."""

_NO_FAULTS = Campaign("No fault.", (), ChaosOptions(), services=("none",))


@dataclass(frozen=True)
class Sample:
    """What one part holds, with the processes that it has started."""

    rss: float
    """MiB."""
    descriptors: int
    threads: int


def sample(pid: int) -> Sample:
    """Read a part. A process that ends meanwhile counts for nothing."""
    rss, descriptors, threads = 0.0, 0, 0
    part = psutil.Process(pid)
    for process in (part, *part.children(recursive=True)):
        try:
            with process.oneshot():
                rss += process.memory_info().rss / (1 << 20)
                descriptors += process.num_fds()
                threads += process.num_threads()
        except psutil.NoSuchProcess:
            continue
    return Sample(rss, descriptors, threads)


@dataclass(frozen=True)
class Growth:
    """Compares medians of the first and the last quarter."""

    part: str
    before: Sample
    after: Sample
    hours: float

    @property
    def is_kept(self) -> bool:
        """Whether nothing grew."""
        return (
            self.after.rss - self.before.rss <= MOST_MIB + MOST_MIB_AN_HOUR * self.hours
            and self.after.descriptors - self.before.descriptors <= MOST_DESCRIPTORS
            and self.after.threads - self.before.threads <= MOST_THREADS
        )

    def row(self) -> str:
        """Return a line of the table."""
        before, after = self.before, self.after
        return (
            f"| {self.part} | {before.rss:.0f} → {after.rss:.0f} | {before.descriptors} → {after.descriptors} "
            f"| {before.threads} → {after.threads} |"
        )


def growth(part: str, samples: Sequence[Sample], hours: float) -> Growth:
    """Compare the first and the last quarter of these samples. ``hours``: from the first to the last one."""
    quarter = max(len(samples) // 4, 1)
    return Growth(part, _median(samples[:quarter]), _median(samples[-quarter:]), hours)


def _median(samples: Sequence[Sample]) -> Sample:
    return Sample(
        statistics.median(each.rss for each in samples),
        round(statistics.median(each.descriptors for each in samples)),
        round(statistics.median(each.threads for each in samples)),
    )


class Endurance:
    """Runs the mix for a while, and reads the parts meanwhile."""

    def __init__(self, run: LayoutRun, seconds: float, rate: float) -> None:
        self._run = run
        self._seconds = seconds
        self._rate = rate
        self.samples: dict[str, list[Sample]] = {}
        self.records: list[Record] = []

    async def work(self, target: Target) -> None:
        """Send requests for the seconds, after their undisturbed answers were recorded."""
        async with self._run.loaded(target, self._rate) as load:
            loop = asyncio.get_running_loop()
            began = loop.time()
            reading = asyncio.create_task(self._read(target))
            try:
                await self._send(load, began)
            finally:
                reading.cancel()
                await asyncio.wait([reading])

    async def _send(self, load: Load, began: float) -> None:
        loop = asyncio.get_running_loop()
        self.records = await load.run(1, lambda: loop.time() - began > self._seconds, loop.time)

    async def _read(self, target: Target) -> None:
        await asyncio.sleep(self._seconds * WARM_SHARE)
        while True:
            for part in target.mesh.parts:
                assert part.state is not None
                found = await asyncio.to_thread(sample, part.state.pid)
                self.samples.setdefault(part.spec.name, []).append(found)
            await asyncio.sleep(min(EVERY_SECONDS, self._seconds / 20))


def report(endurance: Endurance, seconds: float) -> bool:
    """Print the table. Returns whether nothing was lost and nothing grew."""
    failed = [record for record in endurance.records if record.failure is not None]
    wrong = [record for record in endurance.records if record.is_wrong]
    hours = seconds * (1 - WARM_SHARE) / 3600
    found = [growth(name, samples, hours) for name, samples in sorted(endurance.samples.items())]
    print(f"{len(endurance.records)} requests in {seconds:.0f} s: {len(failed)} failed, {len(wrong)} wrong")
    print("\n| part, with its processes | MiB resident | descriptors | threads |\n|---|---|---|---|")
    print(*(each.row() for each in found), sep="\n")
    print(f"\n{machine.describe()}")
    for record in (*failed, *wrong)[:20]:
        print(f"! {record.case} over {record.client}: {record.failure or 'wrong'}: {record.detail}")
    grown = [each.part for each in found if not each.is_kept]
    if grown:
        print(f"! grew: {', '.join(grown)}")
    return not (failed or wrong or grown)


def run(seconds: float, rate: float, seed: int, layout: str) -> bool:
    """Run a mesh with the hash worker. Returns whether nothing was lost and nothing grew."""
    options = ChaosOptions(layout=layout, worker="hash", seed=seed, min_tokens=40, max_tokens=120)  # type: ignore[arg-type]
    (only,) = layouts_of(options)
    lines = Tail()
    endurance = Endurance(LayoutRun(only, (0, 1), _NO_FAULTS, options, print), seconds, rate)
    try:
        asyncio.run(run_layout(only, options, cuts_links=False, write_line=lines, work=endurance.work))
    except BaseException:
        print(lines.text(), file=sys.stderr)
        raise
    return report(endurance, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=7200.0, help="how long (7200)")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second (4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=("whole", "split"), default="split")
    arguments = parser.parse_args()
    return 0 if run(arguments.seconds, arguments.rate, arguments.seed, arguments.layout) else 1


if __name__ == "__main__":
    sys.exit(main())
