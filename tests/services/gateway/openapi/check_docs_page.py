"""``make browser``: what ``/docs`` shows once a real browser (``chromium``) has run its script."""

import asyncio
import html
import re
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE
from pathlib import Path

from tests.services.gateway.fakes import FakeMesh

_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--enable-logging=stderr")
_SECONDS = 60


async def browse(url: str, profile: Path) -> tuple[str, list[str]]:
    """The page's elements, as they are in the end, and what went wrong on the way."""
    command = ("chromium", *_FLAGS, f"--user-data-dir={profile}", "--dump-dom", url)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    async with asyncio.timeout(_SECONDS):
        page, log = await process.communicate()
    complaints = [line for line in log.decode().splitlines() if re.search(r"CONSOLE.*(Error|Refused|Uncaught)", line)]
    return page.decode(), complaints


async def check(directory: Path) -> list[str]:
    """What is not as it should be."""
    async with FakeMesh(directory).gateway() as mesh, mesh.http() as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
        page, wrong = await browse(f"http://{mesh.http_address}/docs", directory / "profile")
    shown = re.findall(r"<summary><b>(\w+)</b><code>([^<]+)</code>", page)
    for path, methods in paths.items():
        wrong += [f"not shown: {method} {path}" for method in methods if (method, html.escape(path)) not in shown]
    print(f"{len(shown)} operations are shown")
    return wrong


def main() -> int:
    if shutil.which("chromium") is None:
        print("there is no chromium; on Debian: apt-get install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        wrong = asyncio.run(check(Path(directory)))
    print(*wrong, sep="\n", end="")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
