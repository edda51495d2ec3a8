"""Check that the pages of a built site load nothing from another host: ``python tools/offline_site.py build/site``."""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}
"""Elements that make a browser load something, and the attribute that says what."""
_NOT_LOADED = {"canonical", "next", "prev"}
_IN_STYLES = re.compile(r"""(?:@import\s+|url\()\s*["']?((?:https?:)?//[^"')\s]+)""")


class _Page(HTMLParser):
    """Collects the addresses that a page loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(_LOADING.get(tag, ""), "") or ""
        if re.match(r"(https?:)?//", address) and values.get("rel") not in _NOT_LOADED:
            self.foreign.append(address)


def foreign_addresses(folder: Path) -> Iterator[str]:
    """Yield each address of another host that a page or a style sheet loads, after the file's name."""
    for path in sorted(folder.rglob("*.html")):
        page = _Page()
        page.feed(path.read_text())
        yield from (f"{path.relative_to(folder)}: {address}" for address in page.foreign)
    for path in sorted(folder.rglob("*.css")):
        yield from (f"{path.relative_to(folder)}: {address}" for address in _IN_STYLES.findall(path.read_text()))


def main() -> int:
    """Print what the site loads from other hosts. Returns 1 if it does, or if it has no page."""
    folder = Path(sys.argv[1])
    pages = len(list(folder.rglob("*.html")))
    found = list(foreign_addresses(folder))
    print(*found, f"{pages} pages, {len(found)} addresses of other hosts", sep="\n")  # noqa: T201
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
