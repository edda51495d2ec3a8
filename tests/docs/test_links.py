"""Every link and every anchor of every Markdown page leads somewhere, on a code forge and on the site."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from .markdown_page import DOCS, ROOT, anchors, forge_slug, links, markdown_files, site_slug

FILES = markdown_files()
IDS = [str(path.relative_to(ROOT)) for path in FILES]


def broken(page: Path, text: str) -> Iterator[str]:
    """Yield what is wrong with the links of a page whose text is ``text``."""
    for link in links(text):
        address = urlsplit(link)
        if address.scheme in ("http", "https"):
            if not address.hostname:
                yield f"{link}: no host"
            continue
        if address.scheme or link.startswith("/"):
            yield f"{link}: neither a relative path nor a web address"
            continue
        target = (page.parent / unquote(address.path)).resolve() if address.path else page
        if not target.exists():
            yield f"{link}: no such file"
        elif DOCS in page.parents and DOCS not in target.parents:
            yield f"{link}: leaves docs/, so the site does not have it; name the path as code instead"
        elif address.fragment and not _has_anchor(target, text if target == page else None, address.fragment):
            yield f"{link}: no such heading"


def _has_anchor(page: Path, text: str | None, fragment: str) -> bool:
    if page.suffix != ".md":
        return False
    text = page.read_text() if text is None else text
    by_forge = fragment in anchors(text, forge_slug, "-")
    return by_forge and (DOCS not in page.parents or fragment in anchors(text, site_slug, "_"))


@pytest.mark.parametrize("page", FILES, ids=IDS)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert list(broken(page, page.read_text())) == []


def test_a_wrong_link_is_found() -> None:
    page = DOCS / "index.md"
    text = "# A title\n[a](nowhere.md) [b](#a-title) [c](#no-title) [d](../README.md) `[e](x.md)`\n![f](/x.svg)\n"
    assert [line.partition(":")[0] for line in broken(page, text)] == [
        "nowhere.md",
        "#no-title",
        "../README.md",
        "/x.svg",
    ]


def test_anchors_are_those_of_both_renderers() -> None:
    text = "# A `b` / c\n```\n# not this\n```\n## Über's 2\n## Über's 2\n"
    assert anchors(text, forge_slug, "-") == {"a-b--c", "übers-2", "übers-2-1"}
    assert anchors(text, site_slug, "_") == {"a-b-c", "ubers-2", "ubers-2_1"}


def test_the_site_has_every_page_once() -> None:
    pages = list(_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(pages) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def _pages(entry: object) -> Iterator[str]:
    """Yield the pages of a part of the site's navigation."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for part in entry.values():
            yield from _pages(part)
    elif isinstance(entry, list):
        for part in entry:
            yield from _pages(part)
