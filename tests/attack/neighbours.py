"""``python -m tests.attack.neighbours [CASE…]``: one tenant fills a stage that all share, and another one is measured.

The neighbour sends a short request every 50 ms, first alone and then beside the load. Its p99 may become twice as long
as alone, and one full step longer. A row also shows by how much the event loops and the interpreter's lock of each part
were late; of event loops that is limited, too. Times are of this machine: run it where nothing else runs.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.mesh.local_mesh import http_url, pids_by_service, with_mesh
from tests.e2e.test_busy import HOOK
from tokenloom.model_files.model_path import DEMO_MODEL, DEMO_MODEL_NAME
from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh

LOADER, NEIGHBOUR = "loader", "neighbour"
"""The tenants, and their keys."""
PAUSE_SECONDS = 0.05
CALM_SECONDS = 6.0
LOADED_SECONDS = 20.0
NUM_SLOWEST = 3
"""Answers of which it is printed where they spent their time."""
MAX_RATIO = 2.0
MAX_STALL_SECONDS = 0.1
STALL_P999_SECONDS = 0.02

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """A load, and what it is measured on.

    Attributes:
        at_once: Requests of the load that are in work at the same time.
        request: Returns the path and the body of its request of this number.
        engine: Flags of the engine.
        full_step: Seconds that its longest step takes; 0: measured with a prompt that fills a step.
        neighbour: What the neighbour sends, in turn.
    """

    at_once: int
    request: Callable[[int], tuple[str, Body]]
    engine: tuple[str, ...]
    full_step: float = 0.0
    neighbour: Sequence[Body] = field(default_factory=lambda: [{}])


def _completion(**fields: Any) -> tuple[str, Body]:
    return "/v1/completions", {"model": DEMO_MODEL_NAME, "max_tokens": 1, **fields}


def _text(number: int) -> tuple[str, Body]:
    text = ("a" if number % 2 else "ab ") * (4 << 20)
    return ("/tokenize", {"prompt": text[: 4 << 20]}) if number % 3 else _completion(prompt=text[: 4 << 20])


def _prompt_logprobs(number: int) -> tuple[str, Body]:
    ids = [300 + (number * 7919 + each * 31) % 1500 for each in range(1500)]
    return _completion(prompt=ids, prompt_logprobs=20)


def _texts_to_embed(number: int) -> tuple[str, Body]:
    texts = [f"text {number} {each} of a day by the river, with a dragon" for each in range(2000)]
    return "/v1/embeddings", {"model": DEMO_MODEL_NAME, "input": texts}


def _slow_grammar(number: int) -> tuple[str, Body]:
    schema = {"type": "integer", "multipleOf": 99_999_989 - 2 * number}
    return _completion(prompt="Once", max_tokens=20, structured_outputs={"json": schema})


def _long_prompt(number: int) -> tuple[str, Body]:
    return _completion(prompt=[300 + (number * 7919 + each * 31) % 1500 for each in range(30_000)])


_TIMED = ("--worker", "timed", "--hash-step-seconds", "0.01")
_CONTEXT = 32_768
CASES = {
    "texts": Case(6, _text, _TIMED, 0.01),
    "prompt-logprobs": Case(12, _prompt_logprobs, ("--worker", "model")),
    "embeddings": Case(4, _texts_to_embed, ("--worker", "hash", "--hash-step-seconds", "0.01"), 0.01),
    "grammars": Case(
        64,
        _slow_grammar,
        ("--worker", "hash", "--hash-step-seconds", "0.01"),
        0.01,
        [{}, {"structured_outputs": {"regex": "[a-c]{3}"}}],
    ),
    # A step of 2,048 tokens takes 30 ms.
    "prompts": Case(32, _long_prompt, (*_TIMED, "--hash-token-seconds", "1e-5", "--num-kv-blocks", "65536"), 0.03),
}


class Neighbour:
    """Sends short requests one after the other.

    Attributes:
        seconds: Of each answer.
        slowest: Where the slowest answers spent their time, as the gateway says; with their seconds.
        statuses: How often each was answered.
    """

    def __init__(self, http: httpx.AsyncClient, bodies: Sequence[Body]) -> None:
        self._http = http
        self._bodies = bodies
        self._numbers = count()
        self.seconds: list[float] = []
        self.slowest: list[tuple[float, dict[str, Any]]] = []
        self.statuses: Counter[int] = Counter()

    async def measure(self, seconds: float) -> None:
        """Send for so long."""
        self.seconds, self.slowest, self.statuses = [], [], Counter()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            number = next(self._numbers)
            body = {"prompt": f"Once upon {number} times", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
            body |= {"model": DEMO_MODEL_NAME, "return_timeline": True, **self._bodies[number % len(self._bodies)]}
            began = time.monotonic()
            response = await self._http.post("/v1/completions", json=body, headers=_key(NEIGHBOUR))
            self.seconds.append(took := time.monotonic() - began)
            if response.is_success:
                self.slowest.append((took, response.json()["timeline"]))
                self.slowest = sorted(self.slowest, key=itemgetter(0))[-NUM_SLOWEST:]
            self.statuses[response.status_code] += 1
            await asyncio.sleep(PAUSE_SECONDS)

    def quantile(self, part: float) -> float:
        """Return a quantile of the answers' seconds."""
        return sorted(self.seconds)[min(int(len(self.seconds) * part), len(self.seconds) - 1)]


class Stalls:
    """Reads what the hook of the parts wrote."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def worst(self, since: float) -> dict[str, tuple[float, float]]:
        """Return the 99.9th percentile and the longest, by process, in seconds. ``since``: monotonic seconds."""
        found = {}
        for file in self._folder.iterdir():
            name, *lines = file.read_text().splitlines()
            rows = [tuple(map(float, line.split())) for line in lines]
            rows = [row for row in rows if row[0] >= since]
            late = sorted(each for row in rows for each in row[2:])
            if late:
                rank = int(sum(row[1] for row in rows) * 0.001)
                found[f"{_short(name)} {file.name}"] = late[-1 - min(rank, len(late) - 1)], late[-1]
        return found


class Processors:
    """Measures what the processes below this one compute from now on, and how long their first threads, which run their
    event loops, wait for a processor meanwhile."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = self._read()

    def lines(self) -> list[str]:
        """Return a line for each process that has computed notably: shares of the time since."""
        seconds, lines = time.monotonic() - self._began, []
        for process, (name, computed, waited) in self._read().items():
            _, computed_before, waited_before = self._before.get(process, ("", 0.0, 0.0))
            share, wait = (computed - computed_before) / seconds, (waited - waited_before) / seconds
            if share >= 0.01:
                lines.append(f"{name:<44} {share:6.1%} of a processor; its first thread waited {wait:6.1%} for one")
        return sorted(lines)

    def _read(self) -> dict[int, tuple[str, float, float]]:
        found = {}
        for process in psutil.Process().children(recursive=True):
            with suppress(OSError, psutil.Error):
                times = process.cpu_times()
                first = Path(f"/proc/{process.pid}/task/{process.pid}/schedstat")
                words = " ".join(process.cmdline()).partition(" -m ")[2].split() or [process.name()]
                name = f"{_short(words[0])} {process.pid}"
                found[process.pid] = name, times.user + times.system, int(first.read_text().split()[1]) / 1e9
        return found


def _short(name: str) -> str:
    words = [word for word in name.split() if not word.startswith("-")]
    return (words[0] if words else name).removeprefix("tokenloom.").removeprefix("services.")


async def _load(case: Case, url: str) -> None:
    """Send the requests of a load until standard input ends, then print how often each status was answered."""
    numbers = count()
    statuses: Counter[int] = Counter()
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=httpx.Limits(max_connections=None)) as http:

        async def send() -> None:
            while True:
                path, body = case.request(next(numbers))
                with suppress(httpx.HTTPError):
                    response = await http.post(path, json=body, headers=_key(LOADER))
                    statuses[response.status_code] += 1
                    if response.status_code in {429, 503}:
                        await asyncio.sleep(min(float(response.headers.get("retry-after", "1")), 5.0))

        print("sending", flush=True)
        tasks = [asyncio.create_task(send()) for _ in range(case.at_once)]
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
    print(dict(statuses))


@asynccontextmanager
async def _loaded(name: str, url: str, answers: list[str]) -> AsyncIterator[None]:
    """Send a load during the block, from a process of its own. ``answers``: gets how often each status came."""
    command = (sys.executable, "-m", "tests.attack.neighbours", name, "--load", url)
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdout.readline()  # it sends from here on
        await asyncio.sleep(3.0)
        yield
        process.stdin.close()
        answers.append((await process.stdout.read()).decode().strip())
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def measure(name: str, case: Case, seconds: float) -> list[str]:
    """Print a row for one case. Returns what is beyond its limit, in words."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        stalls = Path(directory) / "stalls"
        stalls.mkdir()
        os.environ["TEST_STALLS"] = str(stalls)
        file = Path(directory) / "keys.toml"
        digests = {tenant: sha256(tenant.encode()).hexdigest() for tenant in (LOADER, NEIGHBOUR)}
        tables = (f'[[tenant]]\nname = "{tenant}"\nkey_sha256 = ["{key}"]\n' for tenant, key in digests.items())
        file.write_text("".join(tables))
        gateway = ("--api-key-file", str(file), "--cache-salt-secret", "s" * 16)
        limits = ("--tenant-pending-grammars", "256", "--max-queue-seconds", "3600")
        options = MeshOptions(
            _with_context(Path(directory)),
            DEMO_MODEL_NAME,
            port=0,
            flags={"engine": case.engine, "gateway": (*gateway, *limits)},
            common_flags=("--log-level", "error"),
        )

        async def work(mesh: Mesh) -> None:
            wrong.extend(await _measure(mesh, name, case, seconds, Stalls(stalls)))

        await with_mesh(options, work)
    return wrong


def _with_context(directory: Path) -> Path:
    """Return a copy of the demo's model whose context is long enough for all cases."""
    model = directory / DEMO_MODEL_NAME
    shutil.copytree(DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": _CONTEXT}))
    return model


async def _measure(mesh: Mesh, name: str, case: Case, seconds: float, stalls: Stalls) -> list[str]:
    answers: list[str] = []
    async with httpx.AsyncClient(base_url=http_url(mesh), timeout=300.0) as own:
        neighbour = Neighbour(own, case.neighbour)
        await neighbour.measure(2.0)
        full_step = case.full_step or await _full_step(own)
        await neighbour.measure(CALM_SECONDS)
        calm = neighbour.quantile(0.99)
        async with _loaded(name, http_url(mesh), answers):
            began, processors = time.monotonic(), Processors()
            await neighbour.measure(seconds)
            computed = processors.lines()
        allowed = MAX_RATIO * calm + full_step
        beside = neighbour.quantile(0.99)
        print(
            f"{name:<16} p50 {neighbour.quantile(0.5) * 1e3:5.0f} ms  p99 {calm * 1e3:4.0f} to {beside * 1e3:5.0f} ms "
            f"(allowed {allowed * 1e3:4.0f}, {len(neighbour.seconds)} answers)  load {answers[0]}"
        )
        for took, timeline in neighbour.slowest:
            parts = (f"{key[:-3]} {ms:.0f}" for key, ms in timeline.items() if key.endswith("_ms") and ms >= 0.5)
            print(f"    an answer after {took * 1e3:.0f} ms, of which {', '.join(parts)} ms at the gateway")
        wrong = [f"{name}: p99 {beside * 1e3:.0f} ms"] if beside > allowed else []
        wrong += [f"{name}: the neighbour got {dict(neighbour.statuses)}"] if set(neighbour.statuses) != {200} else []
        for part, (p999, longest) in sorted(stalls.worst(began).items()):
            print(f"    {part:<60} late p99.9 {p999 * 1e3:4.0f}, at most {longest * 1e3:5.0f} ms")
            if ".loop" in part and (p999 > STALL_P999_SECONDS or longest > MAX_STALL_SECONDS):
                wrong.append(f"{name}: {part} was late by {p999 * 1e3:.0f} ms (p99.9), {longest * 1e3:.0f} at most")
        for line in computed:
            print(f"    {line}")
        for service, pids in pids_by_service(mesh).items():
            for pid in pids:
                print(f"    {service:<20} {_resident(pid):5.0f} MiB")
        return wrong


async def _full_step(http: httpx.AsyncClient) -> float:
    """Return the seconds of a prompt that fills a step, beyond those of a short one."""
    seconds = []
    for number, length in enumerate((16, 2048, 16, 2048, 16, 2048)):
        # Another prompt each time: a cached one is no step, and made the limit 30 to 100 ms too low.
        prompt = [300 + (number * 7919 + n * 31) % 1500 for n in range(length)]
        body = {"model": DEMO_MODEL_NAME, "prompt": prompt, "max_tokens": 1}
        began = time.monotonic()
        await http.post("/v1/completions", json=body, headers=_key(NEIGHBOUR))
        seconds.append(time.monotonic() - began)
    return max(sorted(seconds[1::2])[1] - sorted(seconds[::2])[1], 0.0)


def _resident(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def _key(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"by default all: {', '.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=LOADED_SECONDS, help="of each load [%(default)s]")
    parser.add_argument("--stacks", metavar="FOLDER", help="write there what parts do whose event loops are late")
    parser.add_argument("--load", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"no such case: {' '.join(sorted(unknown))}")
    if arguments.load is not None:
        asyncio.run(_load(CASES[arguments.cases[0]], arguments.load))
        return
    os.environ["PYTHONPATH"] = os.pathsep.join((str(HOOK), *filter(None, (os.environ.get("PYTHONPATH"),))))
    os.environ["TEST_BUSY_SECONDS"] = "0"
    if arguments.stacks is not None:
        Path(arguments.stacks).mkdir(parents=True, exist_ok=True)
        os.environ["TEST_STACKS"] = str(Path(arguments.stacks).absolute())
    wrong = []
    for name in arguments.cases or CASES:
        wrong += asyncio.run(measure(name, CASES[name], arguments.seconds))
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
