"""``python -m tests.soak.flips``: bits flip at random places of the weights of engines that serve, each is found within
the stated time, and as many requests without a flip raise no alarm."""

import argparse
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu_worker.test_weights_scrub import add_requests, flip, make_config, options_of, scrub_of
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.errors import WeightsDamagedError
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.devices import CPUWorker

KINDS = ("fp32", "bf16", "int4", "gguf", "modules")
PATIENCE_SECONDS = 60.0


@dataclass
class Course:
    """What became of the flips of one kind of weights, idle or under load."""

    kind: str
    is_busy: bool
    nbytes: int
    flips: int = 0
    found: int = 0
    seconds: list[float] = field(default_factory=list)
    requests: int = 0
    passes: float = 0.0
    alarms: int = 0

    def __str__(self) -> str:
        load = "busy" if self.is_busy else "idle"
        longest = f"{max(self.seconds, default=0.0):.2f}"
        return (
            f"| {self.kind} | {load} | {self.nbytes / 1e6:.1f} | {self.flips} | {self.found} | {longest} | "
            f"{self.requests} | {self.passes:.0f} | {self.alarms} |"
        )


class Patient:
    """An engine of which bits flip, one after the other; each is mended when it was found."""

    def __init__(self, kind: str, seconds: float, directory: Path) -> None:
        config = make_config(seconds, **options_of(kind, directory))
        self.worker = CPUWorker(config)
        self.core = EngineCore(config, UniProcExecutor(self.worker))
        self.scrub = scrub_of(self.worker)
        self._found = threading.Event()
        refuse = self.worker._refuse_steps

        def refused(reason: str) -> None:
            refuse(reason)
            self._found.set()

        self.scrub._on_damage = refused

    def flip(self, chance: random.Random, *, is_busy: bool) -> float | None:
        """Flip a bit of any byte, each as likely. Returns the seconds until it was found; None: it was not."""
        tensors = list(self.worker._weights().values())
        (tensor,) = chance.choices(tensors, [each.nbytes for each in tensors])
        at, bit = chance.random(), chance.randrange(8)
        if is_busy:
            self._serve_for(chance.random() * self.scrub.pass_seconds)
        else:
            self._found.wait(chance.random() * self.scrub.pass_seconds)
        assert not self._found.is_set(), self.scrub.damage
        began = time.monotonic()
        flip(tensor, at, bit)
        if is_busy:
            with contextlib.suppress(WeightsDamagedError):
                self._serve_for(PATIENCE_SECONDS)
        else:
            self._found.wait(PATIENCE_SECONDS)
        seconds = time.monotonic() - began
        flip(tensor, at, bit)
        return seconds if self._mend() else None

    def _mend(self) -> bool:
        """Let the engine go on as if nothing had been. Returns whether something was."""
        if not self._found.wait(1.0):
            return False
        for thread in threading.enumerate():  # the one that has found it ends
            if thread.name == "weights-scrub":
                thread.join()
        self._found.clear()
        self.scrub.damage = ""
        del self.worker.execute_model, self.worker.execute_dummy_batch
        threading.Thread(target=self.scrub._run, name="weights-scrub", daemon=True).start()
        self.core.abort_requests(list(self.core.scheduler.requests))
        return True

    def serve(self, count: int) -> None:
        """Answer so many requests."""
        for _ in range(0, count, 4):
            add_requests(self.core, 4)
            while self.core.has_work():
                self.core.step()

    def _serve_for(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            if not self.core.has_work():
                add_requests(self.core, 4)
            self.core.step()


def run(flips: int, requests: int, seconds: float, seed: int, kinds: tuple[str, ...] = KINDS) -> Iterator[Course]:
    """Yield what became of so many flips of each kind. ``seconds``: of a pass."""
    chance = random.Random(seed)
    for kind in kinds:
        with tempfile.TemporaryDirectory() as directory:
            for is_busy in (False, True):
                patient = Patient(kind, seconds, Path(directory))
                course = Course(kind, is_busy, patient.scrub.num_bytes)
                for _ in range(flips):
                    course.flips += 1
                    if (found := patient.flip(chance, is_busy=is_busy)) is not None:
                        course.found += 1
                        course.seconds.append(found)
                if is_busy:
                    before = patient.scrub.num_compared
                    patient.serve(requests)
                    course.requests, course.alarms = requests, int(bool(patient.scrub.damage))
                    course.passes = (patient.scrub.num_compared - before) / len(patient.scrub._pieces)
                patient.core.shutdown()
                yield course


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=100, help="of each kind of weights, idle and under load")
    parser.add_argument("--requests", type=int, default=1000, help="of each kind, without a flip")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a pass")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    print("| weights | load | MB | flips | found | longest s | requests | passes | false alarms |", flush=True)
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    is_good = True
    for course in run(flags.flips, flags.requests, flags.seconds, flags.seed):
        print(course, flush=True)
        is_good &= course.found == course.flips and not course.alarms
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
