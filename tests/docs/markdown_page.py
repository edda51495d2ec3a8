"""Reads a Markdown page: its headings, its anchors and its links, outside of code."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_ASIDE = {".git", ".venv", "build", "dist", "node_modules"}
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_ADDRESS = re.compile(r"<(https?://[^>\s]+)>|\b(?:href|src)=\"([^\"]+)\"")


def markdown_files(folder: Path = ROOT) -> list[Path]:
    """Return every Markdown file below a folder, without those of environments and builds."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and path.name not in _ASIDE:
            found += markdown_files(path)
        elif path.suffix == ".md":
            found.append(path)
    return found


def prose(text: str) -> str:
    """Return a page's text with the lines of code blocks and the inside of code spans left out."""
    lines, fence = [], ""
    for line in text.splitlines():
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence = ""
        elif not fence:
            lines.append(line)
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "``", "\n".join(lines))


def links(text: str) -> Iterator[str]:
    """Yield the targets of links and images, in Markdown and in HTML."""
    body = prose(text)
    yield from (match[1] for match in _LINK.finditer(body))
    yield from (match[1] or match[2] for match in _ADDRESS.finditer(body))


def anchors(text: str, slug: Callable[[str], str], separator: str) -> set[str]:
    """Return the ids of a page's headings. A repeated one is numbered after ``separator``."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in headings(text):
        name = slug(heading)
        found.add(f"{name}{separator}{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def headings(text: str) -> Iterator[str]:
    """Yield the text of a page's headings as readers see it: without marks of code, emphasis and links."""
    fence = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fence = not fence
        elif not fence and (match := re.match(r"#{1,6} +(.*?)(?: +#+)? *$", line)):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1])
            yield re.sub(r"[`*]", "", plain)


def forge_slug(heading: str) -> str:
    """Return the id that code forges give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def site_slug(heading: str) -> str:
    """Return the id that Python-Markdown gives a heading on the site."""
    ascii_only = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())
