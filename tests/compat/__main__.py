"""``python -m tests.compat [COMMIT]``: serves requests with meshes whose parts are of two releases.

Each kind of part in turn is of the old release; then the parts are upgraded one kind after the other, in the order of
``docs/operate/operations.md``. The answers must be those of a mesh of one release.
"""

import argparse
import asyncio
import logging
import sys
from pathlib import Path

import httpx

from tokenloom.client import AsyncClient

from .mixed_mesh import MODEL, SERVICES, mixed_mesh, release

LAST_RELEASE = "cf6cf30"
PROMPT = list(range(100, 120))
COMMON = {"model": MODEL, "max_tokens": 24, "ignore_eos": True}
BODIES = (
    {**COMMON, "prompt": PROMPT, "temperature": 0},
    {**COMMON, "prompt": "Once upon", "temperature": 0, "logprobs": 2},
    {**COMMON, "prompt": PROMPT, "n": 2, "seed": 7, "temperature": 0.8},
    {**COMMON, "prompt": "Once upon", "temperature": 0, "stream": True},
    {**COMMON, "prompt": ["a b c", "d e f"], "temperature": 0, "stop": ["zzzz"]},
)


async def answers(http_port: int, grpc_port: int) -> list[object]:
    """Return what every kind of request is answered with. Raises for one that fails."""
    found: list[object] = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=60) as http:
        for body in BODIES:
            response = await http.post("/v1/completions", json=body)
            response.raise_for_status()
            found.append(_stable(response.text) if "stream" in body else response.json()["choices"])
        chat = {**COMMON, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
        response = await http.post("/v1/chat/completions", json=chat)
        response.raise_for_status()
        found.append(response.json()["choices"])
    async with AsyncClient(f"127.0.0.1:{grpc_port}", timeout=60) as client:
        found.append((await client.generate(PROMPT, max_tokens=24, temperature=0, logprobs=1)).outputs)
        chunks = [chunk async for chunk in await client.stream("Once upon", max_tokens=24, temperature=0)]
        found.append("".join(chunk.text for chunk in chunks))
    return found


def _stable(events: str) -> list[str]:
    """Return the texts of a stream; how they are cut into events is a matter of time."""
    texts = [part.split('"')[0] for part in events.split('"text":"')[1:]]
    return ["".join(texts)]


async def check(old: Path, old_services: tuple[str, ...], expected: list[object]) -> bool:
    """Print how a mesh answers, and return whether it answers as it should."""
    name = ", ".join(old_services)
    try:
        async with mixed_mesh(old, old_services) as (ports, tail):
            try:
                found = await answers(ports.http, ports.grpc)
            except Exception as error:
                print(f"FAILED  old: {name}: {error!r}\n{tail.text()}", flush=True)
                return False
    except Exception as error:
        print(f"FAILED  old: {name}: the mesh did not start: {error!r}", flush=True)
        return False
    is_equal = found == expected
    print(f"{'ok     ' if is_equal else 'DIFFERS'} old: {name}", flush=True)
    return is_equal


async def run(commit: str, services: tuple[str, ...]) -> bool:
    with release(commit) as old:
        async with mixed_mesh(old, ()) as (ports, _):
            expected = await answers(ports.http, ports.grpc)
        mixtures = [(service,) for service in services]
        if services == SERVICES:  # a mesh in the middle of its upgrade
            mixtures += [SERVICES[done:] for done in range(1, len(SERVICES) - 1)]
        results = [await check(old, mixture, expected) for mixture in mixtures]
    return all(results)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("commit", nargs="?", default=LAST_RELEASE, help="of the old release")
    parser.add_argument("--old", choices=SERVICES, action="append", help="only these parts are old, one at a time")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    return 0 if asyncio.run(run(arguments.commit, tuple(arguments.old or SERVICES))) else 1


if __name__ == "__main__":
    sys.exit(main())
