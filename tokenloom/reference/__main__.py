"""Writes all pages that derive from the code: ``python -m tokenloom.reference docs``."""

import sys
from collections.abc import Mapping
from pathlib import Path

from . import grpc_reference
from .from_vllm import from_vllm
from .grpc_reference import read_protos
from .service_pages import callers, configuration, http_api

PAGES = {
    "reference/configuration.md": configuration,
    "reference/callers.md": callers,
    "reference/http.md": http_api,
    "start/from-vllm.md": from_vllm,
}
"""What returns the text of a page."""


def grpc_pages() -> Mapping[str, str]:
    """Return the pages about the gRPC contracts by path: an overview, and a page for each proto file."""
    pages = grpc_reference.pages(read_protos())
    return {f"reference/grpc/{name}": text for name, text in pages.items()}


def main(folder: Path) -> None:
    """Write all pages below ``folder``."""
    for name, text in {**{name: write() for name, write in PAGES.items()}, **grpc_pages()}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
