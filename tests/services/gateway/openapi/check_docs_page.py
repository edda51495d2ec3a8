"""``make browser``: what ``/docs`` shows in a real browser (``chromium``), on a narrow and on a wide screen."""

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.services.gateway.fakes import FakeMesh
from tests.services.gateway.page.axe import violations
from tests.services.gateway.page.chromium import Page, page
from tests.services.gateway.page.page_audit import Findings

SCREENS = ((390, 844), (1440, 900))
_SHOWN = """[...document.querySelectorAll('summary')].map((each) =>
  [each.querySelector('b').textContent, each.querySelector('code').textContent])"""
_OVERPRINTED = """[...document.querySelectorAll('summary')].filter((each) => {
  const boxes = [...each.children].map((child) => child.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const isCut = [...each.children].some((child) => child.scrollWidth > child.clientWidth + 1 && child.clientWidth);
  return isCut || boxes.some((a, at) => boxes.slice(at + 1).some((b) => meet(a, b)));
}).map((each) => each.textContent)"""
"""Lists operations of which one column is printed over another one."""
_OPEN = """(() => {
  for (const each of document.querySelectorAll('details')) each.open = true;
  return new Promise((done) => setTimeout(() => done(document.querySelectorAll('.about').length), 100));
})()"""


class DocsChecks(Findings):
    """Looks at the page, and collects what is not as it should be."""

    async def check(self, paths: dict[str, Any]) -> None:
        wanted = sorted([method, path] for path, methods in paths.items() for method in methods)
        await self.tab.until(f"document.querySelectorAll('summary').length >= {len(wanted)}")
        self.expect(sorted(await self.tab.run(_SHOWN)) == wanted, f"{len(wanted)} operations are shown")
        for width, height in SCREENS:
            await self.tab.show(width, height)
            printed = await self.tab.run(_OVERPRINTED)
            self.expect(not printed, f"{width} pixels: no path is printed over something {printed or ''}")
            wide = await self.tab.run("document.documentElement.scrollWidth")
            self.expect(wide <= width, f"{width} pixels: it fits")
        await self.find()
        self.expect(await self.tab.run(_OPEN) == len(wanted), "every operation opens")
        await self.send()
        for scheme in ("light", "dark"):
            await self.tab.prefer(scheme)
            found = await violations(self.tab)
            self.expect(not found, f"axe finds nothing, {scheme} {found or ''}")

    async def find(self) -> None:
        search = "document.querySelector('#search')"
        await self.tab.run(f"{search}.focus()")
        await self.tab.write("POST tokenize")
        left = await self.tab.run("[...document.querySelectorAll('summary code')].filter((each) => "
                                  "each.checkVisibility()).map((each) => each.textContent)")  # fmt: skip
        self.expect(sorted(left) == ["/detokenize", "/tokenize"], f"a search finds {left}")
        await self.tab.run(f"{search}.value = ''; {search}.dispatchEvent(new Event('input'))")

    async def send(self) -> None:
        """Try an operation with its example."""
        operation = (
            "[...document.querySelectorAll('details')].find((each) => each.textContent.startsWith('get/version'))"
        )
        await self.tab.run(f"{operation}.querySelector('button').click()")
        await self.tab.until(f"{operation}.querySelector('pre').textContent")
        text = await self.tab.run(f"{operation}.querySelector('pre').textContent")
        self.expect('"version"' in text, f"an operation is tried: {text!r}")
        body = await self.tab.run(
            "[...document.querySelectorAll('textarea')].find((each) => "
            "each.ariaLabel === 'Body of POST /v1/chat/completions').value"
        )
        self.expect('"messages"' in body, "a body begins as the example of the document")


async def check(directory: Path) -> list[str]:
    """What is not as it should be."""
    async with FakeMesh(directory).gateway() as mesh, mesh.http() as http, page(directory / "profile") as tab:
        paths = (await http.get("/openapi.json")).json()["paths"]
        checks = DocsChecks(tab)
        await _open(tab, f"http://{mesh.http_address}/docs")
        await checks.check(paths)
        checks.network(f"http://{mesh.http_address}", expected=("favicon.ico",))
        return checks.wrong


async def _open(tab: Page, url: str) -> None:
    await tab.show(*SCREENS[-1])
    await tab.open(url)


def main() -> int:
    if shutil.which("chromium") is None:
        print("there is no chromium; on Debian: apt-get install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        wrong = asyncio.run(check(Path(directory)))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
