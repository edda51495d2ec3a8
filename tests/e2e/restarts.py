"""How soon a part of a mesh is back: ``python -m tests.e2e.restarts [--model DIRECTORY] [-- FLAGS OF serve]``.

It starts ``tokenloom serve``, kills one part after the other with SIGKILL, asks for four tokens behind a prompt of 64
at that moment, and prints a row for each restart: seconds until the first token came and until the part served, and
the processor seconds of all processes that are new. Of an engine it prints the moments of its way back, which it takes
from the kernel and from the log. The machine should be idle.

A checkpoint of the 0.6b shape: ``write_model("qwen3-0.6b", DIRECTORY)`` of ``tokenloom.bench.random_model``.
"""

import argparse
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import httpx
import psutil

from tests.e2e.conftest import serving
from tokenloom.supervisor.state_dir import read_part_state

SERVICES = ("engine", "coordinator", "tokenizer", "output_processor", "gateway")
PROMPT = list(range(7, 71))
SERVES_WITHIN = 300.0
STABLE_SECONDS = 10.5
"""After a run of ten seconds a part is started again without a pause."""
_LINE = re.compile(r"engine-0 +\| (\d\d:\d\d:\d\d\.\d+) .* (\d+ KV blocks|joined coordinator|serving on)")


@dataclass(frozen=True)
class Restart:
    """Seconds from the kill of a part, and what it took of a processor."""

    part: str
    first_token: float
    serving: float
    cpu: float
    moments: str

    def __str__(self) -> str:
        return f"{self.part:<18}{self.first_token:>12.2f}{self.serving:>9.2f}{self.cpu:>7.2f}  {self.moments}"


def first_token(mesh: Any, name: str) -> float | None:
    """Ask once; return the seconds until the first token came, None: an error came instead."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    began = time.monotonic()
    try:
        with httpx.stream("POST", f"{mesh.url}/v1/completions", json=body, timeout=SERVES_WITHIN) as response:
            for line in response.iter_lines():
                if '"text"' in line:
                    return time.monotonic() - began
    except httpx.TransportError:
        pass
    return None


def until_first_token(mesh: Any, name: str, began: float) -> float:
    """Ask until there is an answer: a gateway's connections end with it. Return the seconds until its first token."""
    while first_token(mesh, name) is None:
        time.sleep(0.01)
    return time.monotonic() - began


def until_serving(mesh: Any, service: str, killed: int) -> float:
    """Return the time at which another process of a part than the ``killed`` one is SERVING."""
    while True:
        for file in (mesh.log.parent / "tokenloom").glob(f"mesh-*/{service}-0.json"):
            if (state := read_part_state(file)) is not None and state.pid != killed and state.serving:
                return time.monotonic()
        time.sleep(0.005)


def restarted(mesh: Any, name: str, service: str) -> Restart:
    """Kill the part of a service and measure its way back."""
    supervisor, old = psutil.Process(mesh.process.pid), mesh.part(service)
    before = {process.pid for process in supervisor.children(recursive=True)}
    written = mesh.log.stat().st_size
    old.send_signal(signal.SIGKILL)
    killed, began = time.time(), time.monotonic()
    with ThreadPoolExecutor(1) as asking:
        asked = asking.submit(until_first_token, mesh, name, began)
        served = until_serving(mesh, service, old.pid) - began
        first = asked.result()
    new = [process for process in supervisor.children(recursive=True) if process.pid not in before]
    cpu = sum(process.cpu_times().user + process.cpu_times().system for process in new)
    moments = [("forked", min((process.create_time() for process in new), default=killed) - killed)]
    if service == "engine":
        moments += [(what, at - killed) for what, at in logged(mesh.log.read_text()[written:])]
    shown = ", ".join(f"{what} {seconds:.2f}" for what, seconds in moments)
    return Restart(f"{service}-0", first, served, cpu, shown)


def logged(text: str) -> list[tuple[str, float]]:
    """Return what an engine has logged of its start, with the time of day as seconds since the epoch."""
    today = datetime.now().date()
    return [
        (found[2], datetime.combine(today, datetime.strptime(found[1], "%H:%M:%S.%f").time()).timestamp())
        for found in _LINE.finditer(text)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tokenloom-demo", help="checkpoint directory [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="restarts of each part [%(default)s]")
    parser.add_argument("--services", default=",".join(SERVICES), help="parts to kill [%(default)s]")
    parser.add_argument("flags", nargs="*", help="of `tokenloom serve`, after --")
    options = parser.parse_args()
    with serving() as serve:
        began = time.monotonic()
        mesh = serve(options.model, *options.flags)
        name = httpx.get(f"{mesh.url}/v1/models").json()["data"][0]["id"]
        first_token(mesh, name)
        print(f"first answer of the mesh after {time.monotonic() - began:.2f} s")
        print(f"{'part':<18}{'first token':>12}{'serving':>9}{'CPU':>7}  seconds after SIGKILL", flush=True)
        for service in options.services.split(","):
            for _ in range(options.rounds):
                time.sleep(STABLE_SECONDS)
                print(restarted(mesh, name, service), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
