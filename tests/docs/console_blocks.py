"""The commands of the console blocks of a page, as a reader would type them."""

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    *("docs/start/quickstart.md", "README.md"),
    *("docs/use/coding-agent.md", "docs/use/retrieval.md", "docs/use/two-machines.md"),
)
"""The pages that a newcomer follows, the quick start first: it builds wheels while nothing is installed."""
_BLOCK = re.compile(r"^```console\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
"""Commands, and a block without a language right behind them: what the last one printed."""


@dataclass
class Typed:
    """A command and what the page says that it prints."""

    page: str
    line: int
    text: str
    printed: list[str] = field(default_factory=list)

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def commands_of(page: str, text: str) -> list[Typed]:
    """Return the commands of a page in their order. A command goes on after a backslash, and until its quotes close."""
    found: list[Typed] = []
    for block in _BLOCK.finditer(text):
        first = text[: block.start()].count("\n") + 2
        for number, line in enumerate(block[1].splitlines(), first):
            if line.startswith("$ "):
                found.append(Typed(page, number, line[2:]))
            elif found and not found[-1].printed and _goes_on(found[-1].text):
                found[-1].text += f"\n{line}"
            elif found:
                found[-1].printed.append(line)
        if found and block[2]:
            found[-1].printed += block[2].splitlines()
    return found


def _goes_on(text: str) -> bool:
    return text.endswith("\\") or text.count("'") % 2 == 1


def read_commands(page: str) -> list[Typed]:
    return commands_of(page, (ROOT / page).read_text())
