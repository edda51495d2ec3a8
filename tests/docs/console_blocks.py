"""The commands of the console blocks of a page, as a reader would type them."""

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/start/quickstart.md", "docs/use/coding-agent.md", "docs/use/retrieval.md")
"""The pages that a newcomer follows from top to bottom; `docs/use/two-machines.md` needs two machines."""
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


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
    return found


def _goes_on(text: str) -> bool:
    return text.endswith("\\") or text.count("'") % 2 == 1


def read_commands(page: str) -> list[Typed]:
    return commands_of(page, (ROOT / page).read_text())
