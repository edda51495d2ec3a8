"""``python -m tests.soak.verified``: every request is computed again by another engine (``--verify 1``). Without a flip
none differs; when bits of the KV memory of an engine flip, each request whose tokens change is found, and the engine
ends."""

import argparse
import asyncio
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import torch

from tests.mesh.asking import ask
from tests.mesh.harness import SOON, Mesh, Part
from tokenloom.services.output_processor.request import verification

ENGINE: dict[str, dict[str, Any]] = {
    "hash": {"worker": "hash"},
    "model": {"worker": "model", "dtype": "float32", "num_threads": 1},
}
_AT_ONCE = 4
_LINE = 64
"""Bytes, in each of which that are used a bit flips: most of them change no token of a model."""


@dataclass
class Asked:
    """A request, and the tokens that it has without a flip."""

    prompt: list[int]
    max_tokens: int
    fields: dict[str, Any]
    expected: list[int] = field(default_factory=list)


@dataclass
class Course:
    """What became of the requests."""

    requests: int = 0
    false_alarms: int = 0
    wrong: int = 0
    equal: int = 0
    different: int = 0
    dropped: int = 0
    failed: int = 0
    rounds: int = 0
    ended: int = 0

    def __str__(self) -> str:
        return (
            f"requests: {self.requests}, false alarms: {self.false_alarms}, with other tokens: {self.wrong}; "
            f"computed again: {self.equal} equal, {self.different} different, {self.dropped} not; without finite "
            f"numbers: {self.failed}; rounds of flips: {self.rounds}, engines that ended: {self.ended}"
        )


@dataclass
class Verdict:
    """What became of an output of which two engines computed different tokens."""

    tokens: list[int]
    has_computed: bool
    """Whether the engine that is wrong has computed it, rather than computed it again."""
    engine: str
    """That engine; empty: it is not known."""

    def is_of(self, tokens: list[int]) -> bool:
        return self.has_computed and self.tokens == tokens


def flip(pid: int, chance: random.Random) -> int:
    """Flip random bits of the KV of a process, as many as there are lines that it has written. Returns how many."""
    done = 0
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for begin, size in _pools(pid):
            content = os.pread(memory.fileno(), size, begin)
            used = [at for at in range(0, size, _LINE) if content[at : at + _LINE].strip(b"\0\xff")]
            for at in chance.choices(used, k=len(used)):
                place = begin + at + chance.randrange(_LINE)
                (byte,) = os.pread(memory.fileno(), 1, place)
                bit = chance.randrange(8)
                # The highest bit of an exponent makes of a float32 one that no sum survives: the engine says so itself.
                os.pwrite(memory.fileno(), bytes([byte ^ 1 << (7 if (place % 4, bit) == (3, 6) else bit)]), place)
                done += 1
    return done


def _pools(pid: int) -> list[tuple[int, int]]:
    """Return the first address and the size of each pool that a process has mapped."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        if name.startswith("/memfd:tokenloom-kv"):
            begin, end = (int(address, 16) for address in span.split("-"))
            found.append((begin, end - begin))
    return found


class Verified:
    """A mesh of three engines, all of whose requests are computed again."""

    def __init__(self, mesh: Mesh, http: httpx.AsyncClient, chance: random.Random, verdicts: list[Verdict]) -> None:
        """``verdicts``: of all requests that differed, as they come."""
        self.course = Course()
        self._mesh, self._http, self._chance, self._verdicts = mesh, http, chance, verdicts

    def draw(self, count: int, vocab_size: int = 2000) -> list[Asked]:
        """Return requests, of which several begin alike."""
        chance = self._chance
        beginnings = [[chance.randrange(vocab_size) for _ in range(64)] for _ in range(3)]
        return [
            Asked(
                [*chance.choice(beginnings), *(chance.randrange(vocab_size) for _ in range(chance.randrange(1, 40)))],
                chance.randrange(4, 24),
                chance.choice(({}, {"temperature": 0.8, "seed": chance.randrange(1 << 30)})),
            )
            for _ in range(count)
        ]

    async def learn(self, asked: Sequence[Asked]) -> None:
        """Ask for what is expected."""
        for each, tokens in zip(asked, await self._ask_all(asked), strict=True):
            assert tokens is not None, "no bit has flipped"
            each.expected = tokens

    async def compare(self, asked: Sequence[Asked]) -> list[list[int]]:
        """Ask once more; return what has other tokens."""
        found = await self._ask_all(asked)
        wrong = [tokens for each, tokens in zip(asked, found, strict=True) if tokens not in (None, each.expected)]
        self.course.wrong += len(wrong)
        return [tokens for tokens in wrong if tokens is not None]

    async def _ask_all(self, asked: Sequence[Asked]) -> list[list[int] | None]:
        """Return the tokens of each; None: the engine has found no finite number, and said so."""
        seats = asyncio.Semaphore(_AT_ONCE)

        async def one(each: Asked) -> list[int] | None:
            async with seats:
                answer = await ask(self._http, each.prompt, each.max_tokens, **each.fields)
                if answer.error is None:
                    return answer.token_ids
                assert "no finite logit" in answer.error["message"], answer.error
                self.course.failed += 1
                return None

        found = await asyncio.gather(*map(one, asked))
        self.course.requests += len(asked)
        await self._settle()
        return found

    async def _settle(self) -> None:
        """Wait until all have been computed again."""
        async with asyncio.timeout(600):
            while sum(self._counts()) < self.course.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self.course.equal, self.course.different, self.course.dropped, _ = self._counts()

    def _counts(self) -> tuple[int, ...]:
        (part,) = self._mesh.output_processors
        assert part.host is not None
        name = "tokenloom_output_processor_verified_requests_total"
        outcomes = ("equal", "different", "dropped", "unfit")
        return tuple(int(part.host.metrics.get_sample_value(name, {"outcome": each}) or 0) for each in outcomes)

    async def damage(self, asked: Sequence[Asked]) -> bool:
        """Flip bits of an engine and ask for all; one that was found wrong is started again. Returns whether each
        request with other tokens was found, and no other engine was."""
        victim = self._chance.choice(self._mesh.engines)
        assert flip(victim.core_pid(), self._chance), "no block is in use"
        self.course.rounds += 1
        self._verdicts.clear()
        wrong = await self.compare(asked)
        # What an engine computes for others is wrong too, and found.
        if found := list(self._verdicts):
            await self._restart(victim)
        are_found = all(any(each.is_of(tokens) for each in found) for tokens in wrong)
        return are_found and all(each.engine == victim.settings.instance_id for each in found)

    async def _restart(self, victim: Part) -> None:
        assert victim.host is not None
        async with asyncio.timeout(SOON):
            while not victim.host.failure.happened:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self.course.ended += 1
        await victim.host.failure.take()
        await victim.stop()
        await victim.start()


@asynccontextmanager
async def verified(directory: Path, worker: str, seed: int) -> AsyncIterator[Verified]:
    """Run such a mesh."""
    engine = {**ENGINE[worker], "kv_transports": ("shm",), "num_kv_blocks": 256, "verify": 1.0}
    mesh = Mesh(directory, engines=3, engine=engine, output_processor={"verify": 1.0})
    verdicts, judged = list[Verdict](), verification.judged

    async def noted(case: Any, other: Any, found: Any) -> Any:
        wrong, why = await judged(case, other, found)
        verdicts.append(Verdict(case.output.token_ids, wrong != other, wrong.engine_id if wrong else ""))
        return wrong, why

    with (
        patch.object(verification, "judged", noted),
        patch.object(verification, "LOOK_SECONDS", 0.01),
        patch.object(verification, "MOST_QUARANTINES", 1 << 30),
    ):
        async with mesh.running(), mesh.http() as http:
            yield Verified(mesh, http, random.Random(seed), verdicts)


async def run(directory: Path, worker: str, *, requests: int, rounds: int, seed: int) -> tuple[Course, bool]:
    """Send so many requests without a flip, and then some in each round of flips. Returns what became of them, and
    whether nothing was missed and nothing found that was right."""
    async with verified(directory, worker, seed) as mesh:
        for _ in range(0, requests, 100):
            await mesh.learn(mesh.draw(min(requests, 100)))
        mesh.course.false_alarms = mesh.course.different
        is_good = not mesh.course.different and not mesh.course.dropped
        for _ in range(rounds):
            asked = mesh.draw(12)
            await mesh.learn(asked)
            is_good &= await mesh.damage(asked)
        return mesh.course, is_good and not mesh.course.dropped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", choices=list(ENGINE), default="hash")
    parser.add_argument("--requests", type=int, default=1000, help="without a flip")
    parser.add_argument("--rounds", type=int, default=20, help="of flips, with 12 requests each")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as directory:
        course, is_good = asyncio.run(
            run(Path(directory), flags.worker, requests=flags.requests, rounds=flags.rounds, seed=flags.seed)
        )
    print(f"{course}; {time.monotonic() - began:.0f} s")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
