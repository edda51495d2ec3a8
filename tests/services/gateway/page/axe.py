"""Looks for barriers in a page with axe-core, which npm brings when it is needed: it is not part of the tree."""

import json
import subprocess
from functools import cache
from pathlib import Path

from tests.services.gateway.page.chromium import Page

VERSION = "4.14.1"
_TOOLS = Path(__file__).parents[4] / "build" / "tools" / "axe"
_VIOLATIONS = """axe.run(document, { resultTypes: ['violations'] }).then(({ violations, passes }) => ({
  passes: passes.length,
  violations: violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ target }) => target.join(' ')).join(', ')}`),
}))"""


@cache
def _script() -> str:
    file = _TOOLS / "node_modules" / "axe-core" / "axe.min.js"
    package = file.with_name("package.json")
    if not package.exists() or json.loads(package.read_text())["version"] != VERSION:
        command = ("npm", "install", "--no-save", "--no-audit", "--no-fund", "--prefix", str(_TOOLS))
        subprocess.run((*command, f"axe-core@{VERSION}"), check=True, capture_output=True)
    return file.read_text()


async def violations(tab: Page) -> list[str]:
    """Return the rules that the page breaks as it is now, each with its elements. Raises ``AssertionError`` if axe has
    found nothing to look at, ``CalledProcessError`` if npm cannot bring it."""
    if not await tab.run("'axe' in window"):
        await tab.run(_script())
    found = await tab.run(_VIOLATIONS)
    assert found["passes"] > 10, "axe has looked at nothing"
    listed: list[str] = found["violations"]
    return listed
