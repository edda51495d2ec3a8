"""Shows an answer in Markdown on a terminal while it arrives."""

import re

from markdown_it import MarkdownIt
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters with which an answer could move the cursor or set the terminal's title."""


class MarkdownView:
    """Prints each block of an answer once it is complete; until then it shows the block as far as it has arrived."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pending = ""
        self._live: Live | None = None

    def add(self, text: str) -> None:
        """Take the next piece of the answer."""
        blocks, self._pending = split(self._pending + _CONTROL.sub("", text))
        if blocks:
            self._hide()
            for block in blocks:
                self._console.print(rendered(block))
        if self._pending.strip():
            if self._live is None:
                self._live = Live(console=self._console, transient=True, refresh_per_second=8)
                self._live.start()
            self._live.update(rendered(self._pending))

    def end(self) -> None:
        """Print what is left, also of an answer that was stopped."""
        self._hide()
        if self._pending.strip():
            self._console.print(rendered(self._pending))
        self._pending = ""

    def _hide(self) -> None:
        if self._live is not None:
            self._live.update("")
            self._live.stop()
            self._live = None


def split(text: str) -> tuple[list[str], str]:
    """Return the blocks that no further text changes, and the rest.

    A blank line ends a block, unless it is within a fence of code, or the next line is indented and so may belong to an
    item of a list above.
    """
    blocks: list[str] = []
    lines, begin, fence = text.splitlines(keepends=True), 0, ""
    for at, line in enumerate(lines):
        if (found := _FENCE.match(line)) is not None:
            mark = found[1]
            if not fence:
                fence = mark
            elif mark.startswith(fence) and not line.strip(" \n" + fence[0]):
                fence = ""
        is_border = at > begin and not fence and not lines[at - 1].strip() and line[:1].strip()
        if is_border or (fence and found is not None and at > begin and not lines[at - 1].strip()):
            blocks.append("".join(lines[begin:at]))
            begin = at
    return blocks, "".join(lines[begin:])


def rendered(text: str) -> Markdown:
    """Return the Markdown of a text, in which tags of HTML are text and addresses of links are shown."""
    shown = Markdown("", hyperlinks=False)
    # rich's own parser leaves out what stands in tags, which in an answer may be its very subject.
    shown.parsed = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table").parse(text)
    return shown
