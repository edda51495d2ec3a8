"""What an attack is, and how its result is judged."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

from tests.attack.canary import MAX_GAP_SECONDS, Canary
from tests.attack.target import Setup, Target

MIB = 1 << 20
_SAMPLE_SECONDS = 0.01


@dataclass(frozen=True)
class Outcome:
    """What an attack observed.

    Attributes:
        answer: What the mesh answered, in a few words.
        wrong: What should not have happened, whatever the speed of the machine.
        late: What took too long; on a busy machine this proves nothing.
    """

    answer: str
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        name: Its name on the command line.
        run: Does it and returns what it observed. Raises if it cannot prove that it took effect.
        setup: The mesh that it needs.
        max_growth: MiB by which the gateway's memory may grow; None: not limited.
        max_rss: MiB that the gateway may have at most; None: not limited.
        pause: Seconds for which the attack itself stops a process, and thus the canary.
    """

    name: str
    run: Callable[[Target], Outcome]
    setup: Setup = field(default_factory=Setup)
    max_growth: float | None = None
    max_rss: float | None = None
    pause: float = 0.0


@dataclass(frozen=True)
class Result:
    """A row of the table. ``gap``: seconds; ``before``, ``peak``: MiB of the gateway."""

    name: str
    outcome: Outcome
    gap: float
    before: float
    peak: float

    @property
    def problems(self) -> list[str]:
        """What was wrong or late."""
        return [*self.outcome.wrong, *(f"(late) {words}" for words in self.outcome.late)]

    @property
    def verdict(self) -> str:
        """ok, LATE (only clocks object) or WRONG."""
        return "WRONG" if self.outcome.wrong else "LATE" if self.outcome.late else "ok"


class _Memory:
    """Samples the resident memory of a process from a thread.

    Attributes:
        before, peak: MiB.
    """

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.before = self.peak = process.memory_info().rss / MIB

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample during the block."""
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            try:
                self.peak = max(self.peak, self._process.memory_info().rss / MIB)
            except psutil.Error:  # the comparison of process ids reports its death
                return


def run_attack(attack: Attack, target: Target, canary: Canary) -> Result:
    """Run an attack while the canary streams, and judge it."""
    canary.wait_streaming()
    pids = target.pids()
    memory = _Memory(target.gateway)
    with memory.sampled():
        try:
            outcome = attack.run(target)
        except Exception as error:
            outcome = Outcome(
                "failed", wrong=[f"the attack did not take effect: {type(error).__name__}: {error}"[:500]]
            )
        report = canary.report()
    wrong = [*outcome.wrong, *(f"canary: {error}" for error in dict.fromkeys(report.errors))]
    if not report.texts:
        wrong.append("canary: no whole text")
    if target.pids() != pids:
        wrong.append(f"processes were {pids}, now {target.pids()}")
    wrong += _check_memory(attack, memory)
    late = list(outcome.late)
    if report.gap > MAX_GAP_SECONDS + attack.pause * 1.25:
        late.append(f"canary: {report.gap * 1e3:.0f} ms without a token")
    return Result(attack.name, Outcome(outcome.answer, wrong, late), report.gap, memory.before, memory.peak)


def _check_memory(attack: Attack, memory: _Memory) -> Iterator[str]:
    growth = memory.peak - memory.before
    if attack.max_growth is not None and growth > attack.max_growth:
        yield f"the gateway grew by {growth:.0f} MiB, more than {attack.max_growth:.0f}"
    if attack.max_rss is not None and memory.peak > attack.max_rss:
        yield f"the gateway had {memory.peak:.0f} MiB, more than {attack.max_rss:.0f}"
