"""Fake parts, and what they print."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tokenloom.supervisor.output import LineCopier
from tokenloom.supervisor.part_spec import PartSpec

MakeSpec = Callable[..., PartSpec]
_FAKE = str(Path(__file__).with_name("fake_part.py"))


@pytest.fixture
def printed() -> list[tuple[str, str]]:
    """(part, line) in the order in which they were printed."""
    return []


@pytest.fixture
def output(printed: list[tuple[str, str]]) -> Iterator[LineCopier]:
    copier = LineCopier(lambda name, line: printed.append((name, line)))
    yield copier
    copier.close()
    for name, line in printed:  # shown where a test failed
        print(name, line)


@pytest.fixture
def make_spec(socket_dir: Path) -> MakeSpec:
    def make(service: str = "fake", index: int = 0, behaviour: str = "serve") -> PartSpec:
        socket, state_file = socket_dir / f"{service}-{index}.sock", socket_dir / f"{service}-{index}.json"
        listen = "127.0.0.1:0" if behaviour == "leave" else f"unix:{socket}"
        flags = ("--listen", listen, "--state-file", str(state_file), "--metrics-listen", "")
        command = (sys.executable, _FAKE, "--behaviour", behaviour, *flags)
        return PartSpec(service=service, index=index, command=command, state_file=state_file, leftovers=(socket,))

    return make


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits for what another process does, which announces nothing."""

    async def wait(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    return wait
