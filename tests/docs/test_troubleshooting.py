"""Every message that the page quotes exists in the source, and every flag that it names exists."""

import re
from collections.abc import Iterator
from functools import cache

import pytest

from tokenloom.reference.service_pages import SERVICES
from tokenloom.services.runtime.host.options import flag, options_of

from .markdown_page import DOCS, ROOT

PAGE = (DOCS / "operate" / "troubleshooting.md").read_text()
FOLDERS = (
    *("services", "engine_core", "gpu_worker"),
    *(f"tokenloom/{name}" for name in ("cli", "gguf", "model_files", "preflight", "request", "supervisor")),
)
FLAGS_OF_COMMANDS = {"--port", "--merge", "--model", "--served-model-name"}
"""Flags of `tokenloom serve` itself, and of other programs."""
GAP = "…"


def messages() -> Iterator[str]:
    """Yield the code spans with a space in the columns of symptoms and messages."""
    column = 0
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if "cause" in cells:
            column = cells.index("cause") - 1
        elif cells and not cells[0].startswith("---"):
            yield from (code for code in re.findall(r"`([^`]+)`", cells[column]) if " " in code)


@cache
def literals() -> str:
    """Return the source with adjacent literals joined and placeholders replaced by the gap's mark."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text() for path in paths)
    joined = re.sub(r'"\s*\n\s*f?"', "", text)
    return re.sub(r"\{[^{}\n]*\}|%[sdrg]|%\.\d+[fg]", GAP, joined)


def is_in_source(message: str) -> bool:
    pieces = [re.escape(piece.strip()) for piece in message.split(GAP) if piece.strip()]
    return re.search(r"[^\n]*?".join(pieces), literals()) is not None


@pytest.mark.parametrize("message", sorted(set(messages())))
def test_the_message_exists(message: str) -> None:
    assert is_in_source(message)


def test_a_message_that_does_not_exist_is_found() -> None:
    assert not is_in_source("the engine … is asleep on a tree")
    assert len(set(messages())) > 35


def test_flags_that_are_named_exist() -> None:
    known = {flag(name) for service in SERVICES for option in options_of(service).values() for name in option.names}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert named - known - FLAGS_OF_COMMANDS == set()
