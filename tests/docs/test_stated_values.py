"""Defaults and counts that pages state are those of the code."""

import re
from pathlib import Path

import pytest

from .markdown_page import DOCS, ROOT, prose
from .stated_counts import COUNTED, SENTENCES
from .stated_defaults import Stated, defaults_of_the_code, stated_defaults

DEFAULTS = defaults_of_the_code()
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
WRITTEN.remove(DOCS / "reference" / "configuration.md")
"""Pages that state defaults, without the generated one that they are compared with."""
UNCOUNTED = ("decisions.md", "benchmarks.md")
"""Pages of figures that were measured at a time."""


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_defaults_are_those_of_the_code(page: Path) -> None:
    wrong = [stated for stated in stated_defaults(page.read_text()) if not stated.is_so(DEFAULTS)]
    assert wrong == []


def test_defaults_are_found() -> None:
    assert len(DEFAULTS) > 100
    assert sum(len(list(stated_defaults(page.read_text()))) for page in WRITTEN) > 12


def test_a_stale_default_is_found() -> None:
    text = (
        "It waits `--max-queue-seconds` (11 s), (`--frame-interval`, 9 ms), 61 s (`--keep-lost-requests`). "
        "`--access-log` is off by default, and `--drain migrate`, the default, moves.\n\n"
        "| option | default | |\n|---|---|---|\n| `--max-file-bytes` | 255 MiB | |\n| `--batch-dir` | none | |\n"
    )
    found = list(stated_defaults(text))
    assert [stated.flag.strip("-") for stated in found] == [
        "max-queue-seconds",
        "frame-interval",
        "keep-lost-requests",
        "drain",
        "access-log",
        "max-file-bytes",
    ]
    assert not any(stated.is_so(DEFAULTS) for stated in found)
    assert Stated("--frame-interval", "8 ms", 0.008).is_so(DEFAULTS)


@pytest.mark.parametrize("page", SENTENCES)
def test_sentences_that_the_code_fills_stand_in_the_page(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    for sentence in SENTENCES[page]:
        assert sentence in text, f"{page} does not say: {sentence}"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_counts_nothing_of_the_code_that_is_not_compared(page: Path) -> None:
    """A count of tests, flags or the like grows stale with the next change: compare it, or leave it out."""
    if page.name in UNCOUNTED or "reference/grpc" in str(page):
        return
    text = " ".join(prose(page.read_text()).split())
    for sentence in SENTENCES.get(str(page.relative_to(ROOT)), ()):
        text = text.replace(" ".join(prose(sentence).split()), "")
    assert re.findall(COUNTED, text) == []
